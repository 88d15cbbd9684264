"""What lesson 11 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

import math


def step_of(run):
    return run.summary["step_time_s"]


# The film: inside a machine at once, over the network many times later.
inside = film.schedule.src // 2 == film.schedule.dst // 2
assert film.end[~inside].min() > 8 * film.end[inside].max()

# Routing: luck evens out; a favourite has what was asked for, and nobody is lost.
assert even.sum() == tokens * K
assert most < 1.03
assert math.isclose(favourites.sum(), tokens * K)
assert math.isclose(favourites.max() / favourites.mean(), 2.0)

# Mixtral: eight experts, two for each token; the favourite sets the pace, in proportion.
assert len(popularity(E, K, 2.0)) == E
assert not balanced.fits
assert 1.5 < longer < 1.7
assert waits > 0.3
seconds = [step_of(run) for run in found]
assert np.allclose(np.diff(seconds), np.diff(seconds).mean(), rtol=0.05)
assert math.isclose(skewed.where[0].compute, balanced.where[0].compute, rel_tol=0.01)
assert math.isclose(skewed.summary["bytes_sent_per_gpu"], balanced.summary["bytes_sent_per_gpu"], rel_tol=0.01)
assert busiest != idle

# Capacity: as short as if all were even, for a sixth of the visits.
assert math.isclose(rows[0]["step"], step_of(balanced), rel_tol=0.02)
assert 1 / 7 < rows[0]["dropped"] < 1 / 5
assert rows[-1]["dropped"] == 0.0
assert math.isclose(rows[-1]["step"], step_of(skewed), rel_tol=0.01)
assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)

# Experts over machines: exchanges grow, gradients and memory shrink; one copy a machine takes about half.
held = [run.memory.total for run in spread.values()]
assert held[0] > held[1] > held[2] == held[3]
assert not spread["ep 8"].fits
assert 5 < times_as_long < 8
assert table[0]["gradients"] > 2 * table[1]["gradients"] > 4 * table[2]["gradients"]
assert table[2]["step"] < table[0]["step"]
assert 0.4 < hierarchical < 0.5
rail = networks["rails"]
leaving = {rail.link_name(i): rail.link_bandwidth[i] for i in range(rail.n_links)}
nvlink = sum(rate for name, rate in leaving.items() if name.startswith("node0/gpu0 -> node0/nvs"))
assert math.isclose(nvlink / leaving["node0/nic0 -> leaf0"], 9, rel_tol=0.1)

# The same cables: spread by destination as good as rails, drawn by a hash worse, and one cable is full.
makespans = {name: runs["all_to_all"].makespan for name, runs in played.items()}
assert math.isclose(makespans["rails"], makespans["tree, spread by destination"], rel_tol=0.01)
assert 1.3 < loss < 1.6
between = [i for i in range(tree.n_links) if "spine" in tree.link_name(i)]
assert max(loads) == max(loads[i] for i in between) > 0.94
assert min(loads[i] for i in between) < 0.8
assert played["tree, ECMP"]["all_reduce"].makespan > 1.2 * played["rails"]["all_reduce"].makespan

# Overlap: half of what was exposed goes; there is more of it than of compute; memory hardly pays.
assert where.exposed["EP"] > where.compute
beside = train(QWEN, 4, ep=32, microbatches=4, ep_overlap=True)
assert 0.4 < beside.where[0].exposed["EP"] / where.exposed["EP"] < 0.6
assert step_of(beside) < 0.8 * step_of(mine)
assert 1.0 <= beside.memory.at_peak()["activations"] / mine.memory.at_peak()["activations"] < 1.1

# The first exercise.
pairs = [(train(model), train(model, dispatcher="allgather")) for model in ("mixtral-8x7b", QWEN)]
ratios = [b.where[0].exposed["EP"] / a.where[0].exposed["EP"] for a, b in pairs]
assert ratios[0] > 3
assert 0.9 < ratios[1] < 1.2
assert pairs[1][1].summary["bytes_sent_per_gpu"] < 1.1 * pairs[1][0].summary["bytes_sent_per_gpu"]

# The second.
uneven = train(QWEN, 4, ep=32, routing={"kind": "skewed", "skew": 2.0})
assert 1.05 < step_of(uneven) / table[2]["step"] < 1.2
assert table[2]["dispatch, combine"] > 0.5 * table[2]["step"]
