"""What lesson 12 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

import math

import pytest


def step_of(run):
    return run.summary["step_time_s"]


def exposed(run):
    return run.where[0].exposed["CP"] / step_of(run)


# By hand: the ring's result is attention's.
assert error < 1e-12
assert np.allclose(seen, np.tril(seen))

# Zigzag: in order the last has most, and steps wait for it; zigzag is even.
assert work(pieces).sum() == work(zigzag).sum() == n * (n + 1) / 2
totals = work(pieces).sum(axis=1)
assert totals.tolist() == sorted(totals.tolist())
assert totals[0] < 0.3 * mean < 0.3 * totals[-1]
assert 1.5 < ordered < 1.8
assert 1.0 <= balanced < 1.06
assert (work(zigzag).max(axis=0) <= 1.1 * work(zigzag).min(axis=0)).all()

# Three ways on one machine.
by = {row["way"]: row for row in table}
assert math.isclose(by["ring"]["sent for attention"], by["gather"]["sent for attention"], rel_tol=0.05)
assert by["all-to-all"]["sent for attention"] < by["ring"]["sent for attention"]
assert by["ring"]["exposed"] < 0.15 * by["gather"]["exposed"]
assert by["ring"]["exposed"] < 0.01 * by["ring"]["step"]
assert by["ring"]["computes"] > by["gather"]["computes"]
assert min(by, key=lambda way: by[way]["step"]) == "ring"
with pytest.raises(clustersim.ClusterSimError, match="does not divide the 8 key-value heads"):
    train(16, cp_comm_type="a2a")
assert 1.3 < lost < 1.5

# The longer the sequence, the less is exposed: past the hump, nothing.
assert max(share) > 30
assert share[1] > 15
assert share[-1] < 1
assert other[-1] > 3 * share[-1]
assert other[1] < 0.5 * share[1]
names = [short.prepared.topology.link_name(i) for i in range(short.prepared.topology.n_links)]
nics = [i for i, name in enumerate(names) if name.startswith("node0/nic") and "-> leaf" in name]
forward = (0.0, 0.05)
busy = [
    int((plots.link_loads(run.prepared.topology, run.timeline.links, forward)[nics] > 0.05).sum())
    for run in (short, gathered[8192])
]
assert busy == [1, 8]
assert 2.8 < steps[1] / steps[0] < 4

# The formula's T where both take as long, for a NIC and six tenths of the GPU's peak: at the end of the hump.
model = long.prepared.model
heads = {(kernel.heads, kernel.head_dim) for layer in model.layers for kernel in layer.kernels if kernel.seq}
assert heads == {(32, 128)}
crossing = 2 * (8 / 32) * 0.6 * 989e12 / 50e9
assert 65536 / 16 / 2 < crossing < 131072 / 16

# The knob: as few as fit.
tried = {cp: two[65536] if cp == 16 else train(cp, 65536) for cp in (4, 8, 16, 32)}
rates = [run.summary["tokens_per_s_per_gpu"] for run in tried.values()]
assert rates == sorted(rates, reverse=True)
assert [run.fits for run in tried.values()] == [False, True, True, True]
assert ["likelihood of running out" in str(run.verdict) for run in tried.values()] == [False, True, False, False]

# The first exercise.
played = {(16, t): run for t, run in two.items()} | {(32, 65536): tried[32]}
enough = {
    cp: next(t for t in lengths[2:] if exposed(played[cp, t] if (cp, t) in played else train(cp, t)) < 0.1)
    for cp in (16, 32)
}
assert enough == {16: 65536, 32: 131072}

# The second.
SIZES = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [8, 2]}
assert step_of(train(16, 16384, **SIZES)) < 0.7 * step_of(two[16384])
assert 0.98 < step_of(train(16, 131072, **SIZES)) / step_of(long) < 1.02
