"""What lesson 16 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

# The slow GPU's rank has the shortest all-reduces and the longest kernels, and an innocent one the longest all-reduces.
assert slowest["rank"] == 3
assert longest["rank"] != 3
assert min(profiles, key=lambda row: row["all-reduces"])["rank"] == 3
assert sum(row["all-reduces"] > 2 * profiles[3]["all-reduces"] for row in profiles) == 7

# Four courses: from a step on, more and more, once, now and then.
more = {name: seconds / took["well"] - 1 for name, seconds in took.items()}
assert all(more["slow GPU"][3:] > 0.2)
assert all(np.diff(more["hot GPU"][1:]) > -0.01)
assert more["hot GPU"][1] < 0.8 * more["hot GPU"][-1]
assert (more["ECC stall"] > 0.05).sum() == 1
assert [i for i, share in enumerate(more["garbage collection"]) if share > 0.05] == [1, 3]

# In a hang those who speak are innocent, and the one who is silent is not.
assert {wait.rank for wait in hang.waits} == set(range(8)) - {5}
assert len({wait.call.seq for wait in hang.waits}) == 1
assert all(call.ended is not None for call in hang.calls[5])

# The planted incident is found from its files alone.
assert answer.confident
assert (answer.suspects[0].kind, answer.suspects[0].rank) == (right.kind, right.rank)

# A cable is placed by counters, and not by profiles; what would decide says so.
assert told["all profiles"].suspects[0].port is None
assert not told["all profiles"].confident
assert told["with counters of the NICs"].suspects[0].port == "node1/mlx5_2"
assert told["everything"].confident
assert "counters of the NICs" in told["all profiles"].decides
confidence = [one.suspects[0].confidence for one in told.values()]
assert confidence[:4] == sorted(confidence[:4])

# The first exercise: it calls as many as the others, and has not started the first that is pending.
stuck = job({"kind": "stuck_kernel", "rank": 5, "at": "0.3 s"}).hang()
assert len({len(calls) for calls in stuck.calls.values()}) == 1
pending = {rank: next(call for call in calls if call.ended is None) for rank, calls in stuck.calls.items()}
assert pending[5].state == "scheduled"
assert all(call.state == "started" for rank, call in pending.items() if rank != 5)
