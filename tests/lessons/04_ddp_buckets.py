"""What lesson 4 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

from itertools import pairwise

assert by_form[0]["all-reduces"] > 200
assert by_form[2]["all-reduces"] == 1
assert by_form[1]["step"] < min(by_form[0]["step"], by_form[2]["step"])

assert 10 <= best <= 100
assert steps[1] > steps[best] < steps[400]

assert all(x["samples/s"] < y["samples/s"] for x, y in pairwise(rows))

assert "rank 3" in why.verdict
assert 1.15 < ratio < 1.3

# What the answers rest on.
view = ddp(gradient_as_bucket_view=True)
hook = {
    mib: ddp(bucket_cap_mb=mib, comm_hook="fp16_compress").summary["step_time_s"] for mib in (1, 10, 25, 50, 100, 400)
}
assert view.summary["step_time_s"] < default.summary["step_time_s"]
assert view.memory.total < default.memory.total
assert min(hook, key=hook.get) >= 25
assert hook[25] < steps[25]
