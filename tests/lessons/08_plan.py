"""What lesson 8 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

assert 6 <= flops / TOKENS / gpt2.parameters < 7

assert max(usd) < 1.25 * min(usd)  # all within a quarter, from 8 to 64 GPUs
assert said.counts["do not fit"] > 0
on_32 = [row for row in said.options if row.gpus == 32 and row.state == "simulated"]
rates = {name: max(row.rate for row in on_32 if row.machine == name) for name in ("hgx-a100", "hgx-h100")}
assert rates["hgx-h100"] > 2 * rates["hgx-a100"]

assert len(good) >= 2
assert more < 0.1

assert all(value < 0.25 for value in worse.values())

# What the answers rest on.
cheaper = plan_for(h100_price=2.5)
assert {row.machine for row in cheaper.front} == {"hgx-h100"}
assert said.front
assert not [row for row in said.front if row.kind == "ddp"]
assert all(row.state == "memory" for row in said.options if row.kind == "ddp" and row.machine == "hgx-a100")
