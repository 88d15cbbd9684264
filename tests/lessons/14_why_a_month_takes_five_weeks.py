"""What lesson 14 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

import math


def played(**changes):
    made = training(**changes)
    return made, outcome(made, play(made, 300, seed=0))


# Thirty days of steps are five weeks, and the ledger says where the others went.
assert sum(s.end - s.begin for s in one.spans) == one.env.now
assert 34.5 < days.p50 < 35.9
assert days.p95 - days.p5 < 0.03 * days.p50
assert math.isclose(sum(part.days for part in parts.values()), days.mean, rel_tol=1e-9)
assert math.isclose(parts["productive"].days, 30.0)

# The latest of many ranks: drawn as by the formula, in proportion to the variation, each fourfold adding less.
assert np.allclose(latest, law, atol=4 * cv / 20)
assert 30 * jitter < parts["step variation"].days < 1.15 * 30 * jitter
assert all(np.diff(law)[i] > np.diff(law)[i + 1] for i in range(1, len(law) - 2))
half = maxima.step_with_barriers(int(ranks[-1]), cv / 2) - 1
assert math.isclose(half, jitter / 2)

# Failures are Poisson: mean and variance agree, and the rate of a machine is a good machine's.
assert abs(counted.mean() - per_day) < 4 * math.sqrt(per_day / len(counted))
assert abs(counted.var() / counted.mean() - 1) < 4 * math.sqrt(2 / len(counted))
assert len(counted) >= 1000
assert abs(seen - poisson).max() < 4 * math.sqrt(poisson.max() / len(counted))
assert 240 < life / DAY < 300  # nine months
assert high - low > 40  # twenty more than another month may be luck

# A failure: recovery is most of it, and lost work is half the time between two saves.
assert math.isclose(renewal.mean_lost_work(window, month.mtbf), window / 2, rel_tol=0.03)
lost = next(row for row in rows if row["part"] == "lost work")["minutes of each failure"] * MINUTE
assert 0.85 < lost / renewal.mean_lost_work(window, month.mtbf) < 1.0

# The curve is lowest at its middle, flat there, and the formula is on it.
losses = {point.x: 1 - point.simulated for point in points}
assert min(losses, key=losses.get) == save.interval
assert abs(save.interval - best) <= job.step_s
assert all(abs(point.simulated - point.closed_form) < 0.01 for point in points)
assert lost_at(2) - lost_at(1) < 0.02 < lost_at(8) - lost_at(1)
assert lost_at(young / save.interval) - lost_at(1) < 1e-3
assert math.isclose(renewal.young_interval(save.stall, month.mtbf / 4), young / 2)

# Spares: the formula's number is enough, half of it is not.
assert shares == sorted(shares, reverse=True)
assert shares[0] > 10
assert shares[spares.index(needed)] < 1.0
assert spares[0] > away
law_of_five = 100 * (1 - together[:6].sum())
whole_year = training(**{"campaign.nodes.spares": 5, "campaign.duration": "300 d"})
longer = outcome(whole_year, play(whole_year, 100, seed=0)).ledger["waiting for nodes"].share
assert shares[spares.index(5)] < 100 * longer < law_of_five  # the first days count for less

# Larger jobs lose more.
assert [size.simulated for size in sizes] == sorted((size.simulated for size in sizes), reverse=True)
assert 8192 < edge < job.gpus

# Goodputs differ by many points.
medians = {name: said.goodput[name].p50 for name in GOODPUTS}
assert medians["scheduling_goodput"] - medians["productivity_goodput"] > 0.1
assert medians["availability"] > medians["effective_training_time"]

# Each knob gains something.
for knob in (FASTER_DISKS, FASTER_START, FINDING, FEWER):
    assert played(**knob)[1].days.p50 < days.p50 - 0.3

# The first exercise: the root of the stall, in both parts that the interval balances.
asynchronous, of_it = played(**{"campaign.checkpoints": [{"every": "best", "asynchronous": True, "stall": "2 s"}]})
quick = asynchronous.tiers[0].save
assert math.isclose(save.stall / quick.stall, 16, rel_tol=0.05)
assert math.isclose(save.interval / quick.interval, 4, rel_tol=0.05)
fell = {name: of_it.ledger[name].days / part.days for name, part in parts.items() if part.days}
assert 0.22 < fell["checkpoint stalls"] < fell["lost work"] < 0.3
assert all(0.9 < fell[name] < 1.0 for name in ("detection", "restart"))
still = sum(of_it.ledger[name].days for name in ("detection", "restart"))
assert still > 0.5 * sum(of_it.ledger[name].days for name in (*LOSSES, "checkpoint stalls"))

# The second: the root again, and what is paid at each failure.
other, of_other = played(**{"campaign.failures": "rsc1"})
more = month.mtbf / other.mtbf
assert more > 1.5
assert math.isclose(save.interval / other.tiers[0].save.interval, math.sqrt(more), rel_tol=0.02)
grew = {name: of_other.ledger[name].days / part.days for name, part in parts.items() if part.days}
assert all(math.isclose(grew[name], math.sqrt(more), rel_tol=0.05) for name in ("checkpoint stalls", "lost work"))
assert all(more < grew[name] < 1.1 * more for name in ("detection", "restart"))
assert 1.0 < (of_other.days.mean - 30) / (days.mean - 30) < more
assert of_other.days.p50 > days.p50 + 2
