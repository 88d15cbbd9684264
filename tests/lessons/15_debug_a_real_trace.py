"""What lesson 15 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

# The profiler's table: sends take longer than there was time, over what would be a ridiculous network.
assert sends["name"] == "gloo:send"
assert sends["all together"] > 3 * run.makespan
assert size / sends["each, median"] < 1e6

# Read as a pipeline: the last stage is twice as slow, and it is the other one that waits.
assert [row.stage for row in stages] == [0, 1]
assert 1.8 < work[1] / work[0] < 2.2
assert stages[1].imbalance < 0.01 * stages[1].window
assert stages[1].busy > 0.9 * stages[1].window
assert stages[0].imbalance > 0.3 * stages[0].window
waited = [float(run.row_start[run.row_set == rank].sum() - run.row_ready[run.row_set == rank].sum()) for rank in (0, 1)]
assert waited[0] > 10 * waited[1]

# A message takes a fraction of a per cent of what the profile says.
assert min(float(np.median(took)) for took in lasted.values()) > 100 * float(np.median(real))

# The replay is the run, the network is innocent, and the prediction held.
assert abs(free / measured - 1) < 0.02
assert 0.1 < 1 - even / measured < 0.3
assert 0.8 < (work[1] - work[0]) / work[0] < 1.2
assert abs(even / after - 1) < 0.05
assert after < 0.9 * measured

# Launch-bound: more work for the same time, and an operator takes as long whatever it has to do.
assert step[64] < 1.5 * step[1]
assert step[4096] > 7 * step[1]
medians = [float(np.median(spans["end"] - spans["start"])) for spans in (one.spans() for one in tiny.values())]
assert max(medians) < 1.1 * min(medians)
counted = {len(one.spans()["op"]) for one in tiny.values()}
assert len(counted) == 1
assert counted.pop() % 3 == 0
calls = tiny[1].spans()
assert 0.5 < float((calls["end"] - calls["start"]).sum()) / tiny[1].makespan < 0.6
assert eights < 1.01 * ones
assert many > 1.5 * ones

# Three numbers halve the error, small messages most; large ones had nothing to gain but the one that was given.
assert error(as_mine, others) < 0.6 * error(as_kind, others)
assert error(as_mine, small) < 0.5 * error(as_kind, small)
assert error(as_kind, large) < 0.02 < error(as_mine, large) < 0.065 < 0.6 * error(as_kind, small)
assert abs(as_kind[-1] / log[-1] - 1) > 0.055

# The first exercise: what is left is the schedule's bubble.
for row in pipeline.stage_times(mended):
    bubble = row.fill + row.drain + row.gaps
    assert row.imbalance < 0.02 * row.window
    assert 0.5 * row.idle < bubble < row.window / 9

# The second: the smallest alone is about as good as three, each of the others changes next to nothing.
alone = {size: all_reduces((size,)) for size in known}
assert error(alone[2.0**2], others) < 1.15 * error(as_mine, others)
assert min(error(alone[size], others) for size in (2.0**20, 2.0**30)) > 0.9 * error(as_kind, others)
assert min(error(alone[size], small) for size in (2.0**20, 2.0**30)) > 0.9 * error(as_kind, small)
