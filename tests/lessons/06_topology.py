"""What lesson 6 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

assert rows[0]["time"] > 5 * rows[1]["time"]
assert rows[1]["time"] > 1.5 * rows[2]["time"]

assert all(0.9 * n * nic < rate <= n * nic for n, rate in zip(counts, busbw, strict=True))

assert np.isclose(over[1], over[0], rtol=0.01)
assert np.isclose(over[2] / over[3], 2, rtol=0.1)
assert np.isclose(over[3] / over[4], 2, rtol=0.1)

assert "leaf" in why.verdict
assert "spine" in why.verdict

assert slow_bw < dead_bw < healthy_bw

# What the answers rest on.
cut = [fabrics.Change(f"node0/gpu{a} -> node0/gpu{b}", remove=True) for a, b in ((0, 3), (3, 0))]
broken = fabrics.change(nvlink, *cut)
loads, _, rate = all_reduce(broken)
assert 0.6 < rate / all_reduce(nvlink)[2] < 0.75
assert not any(loads[i] > 0.01 for i in range(broken.n_links) if broken.link_kinds[i] == "pcie")
