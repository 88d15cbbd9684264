"""What lesson 2 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

import numpy as np

assert np.isclose(four.makespan, 2 * n * Z / B, rtol=0.01)

assert np.isclose(server[64] / server[8], 64 / 8, rtol=0.01)
assert np.isclose(ring[64], 2 * 63 / 64 * Z / B, rtol=0.02)

assert gpu["step_time_s"] < cpu["step_time_s"]
assert gpu["samples_per_s"] < worker["samples_per_s"]
assert name in ("node0/pcie0 -> node0/cpu0", "node0/cpu0 -> node0/pcie0")

assert steps == sorted(steps, reverse=True)
assert steps[-1] < 1.05 * ring_step

assert all(report.staleness_max <= s for s, report in zip(bounds, seen, strict=True))
assert rates == sorted(rates)

# What the answers rest on.
longer = with_slow_gpu(4, steps=24).summary["samples_per_s"]
assert served(server="worker", servers=8).summary["step_time_s"] > 1.8 * steps[-1]
assert rates[0] < longer < 0.95 * rates[bounds.index(4)]
