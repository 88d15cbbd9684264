"""What lesson 13 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

import math

# What must fit: with tp times pp of 32 next to nothing is left, with 64 there is room.
room_for = {row["tp"] * row["pp"]: row["left"] for row in rows}
assert 0 < room_for[32] < 8 * 2**30
assert room_for[64] > 30 * 2**30
assert 4e11 < llama.parameters < 4.1e11

# Who talks how much: tensor parallelism by far, the pipeline least.
assert sent["TP"] > 8 * sent["DP"]
assert sorted(("TP", "DP", "CP", "PP"), key=sent.get) == ["PP", "CP", "DP", "TP"]

# The mesh: tp in a machine, everything else between; turned round, the pipeline in a machine and tp over eight.
nodes = {row["groups over"]: (row["machines of a group"], row["ranks"]) for row in usual}
assert nodes["tp"] == (1, 8)
assert nodes["cp"] == (2, 2)
assert nodes["pp"] == (8, 8)
assert {row["groups over"]: row["machines of a group"] for row in turned}["pp"] == 1
assert {row["groups over"]: row["machines of a group"] for row in turned}["tp"] == 8
assert 1.5 < slower < 3

# By hand: what does not fit, what each way out costs, and the best that fits.
fits = {row["attempt"]: row["fits"] == "yes" for row in table}
assert fits == dict(zip(attempts, (False, True, True, True, False), strict=True))
steps = [step for step, _ in attempts.values()]
assert steps[3] < steps[0] < min(steps[1], steps[2])
assert steps[4] < steps[3]

# By plan: more stages and four chunks.
assert won.degrees == {"tp": 8, "pp": 16, "cp": 2, "ep": 1}
assert "vpp 4" in won.in_full
assert found[0] < 0.95 * steps[3]
assert found[1].total < ROOM
assert 0.45 < PEAK / found[0] < 0.6

# The first exercise.
LONG = {"batch": 128, "model.seq_len": 32768}
assert tried(8, 2, 8, **LONG)[1].total > 1.5 * ROOM
assert tried(8, 4, 8, **LONG)[1].total > ROOM
eightfold = tried(8, 8, 8, **LONG)
assert math.isclose(eightfold[1].total, attempts["tp 8, cp 2, pp 8"][1].total, rel_tol=0.01)
assert 1.2 < eightfold[0] / steps[3] < 1.4

# The second.
recipe = tried(8, 2, 8, **{**CHUNKS, "parallel.vpp": 8})
assert math.isclose(recipe[0], found[0], rel_tol=0.02)
assert 0.97 * ROOM < recipe[1].total < ROOM
assert recipe[1].total < attempts["the same, four chunks a stage"][1].total
