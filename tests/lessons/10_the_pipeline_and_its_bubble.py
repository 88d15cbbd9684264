"""What lesson 10 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

import math

from clustersim.training.schedules import SCHEDULES


def step_of(run):
    return run.summary["step_time_s"]


# One GPU at work: a quarter of the time each, and so no faster than one.
assert 0.24 < whole.compute / step < 0.27
assert step > 0.95 * sum(row.compute for row in naive.where[1:])

# Micro-batches: faster, but not four times; the formula lies just above the run.
assert 2.3 < faster < 3
assert sum(LAYERS) == 48
law = [100 * (P - 1) / (m + P - 1) for m in counts]
assert all(0.89 * told < seen < told for told, seen in zip(law, shares, strict=True))
assert math.isclose((P - 1) / (enough + P - 1), 0.1)

# 1F1B has the bubble of GPipe, and holds no more than p micro-batches.
assert math.isclose(bubbles[gpipe], bubbles[one_f_one_b], rel_tol=0.02)
assert most[one_f_one_b] < 0.7 * most[gpipe]
assert larger[0] > 3 * most[gpipe]
assert math.isclose(larger[1], most[one_f_one_b], rel_tol=1e-6)
assert [SCHEDULES["1f1b"].peak(rank, P, 1, 32) for rank in range(P)] == [4, 3, 2, 1]

# Two tricks, and what they cost.
by = {row["schedule"]: row for row in rows}
tricks = ["interleaved, two chunks", "zero bubble, ZB-H1", "zero bubble, ZB-2P"]
assert all(by[name]["step"] < 0.9 * by["1F1B"]["step"] for name in tricks)
assert all(by[name]["schedule's bubble"] < 0.6 * by["1F1B"]["schedule's bubble"] for name in tricks)
volumes = {name: run.volume_by_dimension for name, run in runs.items()}
passed = {name: float(sent["sent_per_gpu"][list(sent["dimension"]).index("PP")]) for name, sent in volumes.items()}
assert passed["interleaved, two chunks"] > 2 * passed["1F1B"] > 0
assert by["interleaved, two chunks"]["fullest GPU"] > by["1F1B"]["fullest GPU"]
kept = [runs[name].memory.at_peak()["activations"] for name in tricks[1:]]
assert math.isclose(kept[1], 2 * kept[0], rel_tol=0.05)
late = [row.bubble.get("fill", 0.0) for row in runs["zero bubble, ZB-2P"].where[1:]]
assert max(late) == late[-1] > 0.02 * by["zero bubble, ZB-2P"]["step"]

# The heavy stage: everybody waits for the last one; the layout at the top mends it.
assert heavy.stage == P - 1
assert heavy.compute > 1.3 * mine.where[1].compute
assert waits > 0.1 * step_of(mine)
assert step_of(one_f_one_b) < 0.9 * step_of(mine)
again = train("1f1b", 32, layout=layout)
share = [sum(row.bubble.get("imbalance", 0.0) for row in run.where[1:]) / P / step_of(run) for run in (mine, again)]
assert share[1] > share[0]
# Blocks are whole and the head weighs more than five: what is left is about one of them.
one_block = one_f_one_b.where[1].compute / LAYERS[0]
left = [row.bubble.get("imbalance", 0.0) for row in one_f_one_b.where[1:]]
assert sum(left) / P < 1.05 * one_block
assert sum(left) / P < 0.3 * waits

# A schedule of one's own: the first attempt is no pipeline, and two that wait for each other are refused.
assert step_of(own) > 2 * step_of(rivals["gpipe"])
assert "the order deadlocks: pipeline rank 0 never gets to B0" in said

# The first exercise.
batch = {m: train("1f1b", m, 16 // m) for m in (1, 2, 4, 8, 16)}
gained = [step_of(batch[m]) / step_of(batch[2 * m]) for m in (1, 2, 4, 8)]
promised = [(m + P - 1) / m / ((2 * m + P - 1) / (2 * m)) for m in (1, 2, 4, 8)]
assert gained == sorted(gained, reverse=True)
assert 0 < gained[-1] - 1 < 0.6 * (promised[-1] - 1)
assert 1.05 < batch[16].where[0].compute / batch[8].where[0].compute < 1.15

# The second: the rows of the answer are as good as ZB-H1.
BETTER = """
0F0, 0F1, 0F2, 0F3, 0I0, 0W0, 0I1, 0W1, 0I2, 0W2, 0I3, 0W3
1F0, 1F1, 1F2, 1I0, 1F3, 1I1, 1W0, 1I2, 1W1, 1I3, 1W2, 1W3
2F0, 2F1, 2I0, 2F2, 2I1, 2F3, 2I2, 2W0, 2I3, 2W1, 2W2, 2W3
3F0, 3I0, 3F1, 3I1, 3F2, 3I2, 3F3, 3I3, 3W0, 3W1, 3W2, 3W3
"""
assert step_of(play(BETTER)) < 0.85 * step_of(rivals["1f1b"])
