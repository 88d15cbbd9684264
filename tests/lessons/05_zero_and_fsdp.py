"""What lesson 5 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

for name, run in runs.items():
    assert np.isclose(run.memory.model_states, table[name] * parameters, rtol=0.01)

assert not runs["DDP"].fits
assert all(run.fits for name, run in runs.items() if name != "DDP")

assert all(np.isclose(found[name], value, rtol=0.04) for name, value in law.items())

assert gain > 0.1 * on.summary["step_time_s"]
assert off.memory.total <= on.memory.total

assert full[0] < hybrid[0]
assert hybrid[-1] < full[-1]

assert offload.memory.total < runs["FSDP"].memory.total
assert slower > 1.2

# What the answers rest on.
keep = train("fsdp", param_dtype="bf16", reshard_after_forward=False)
slow = {"cluster.changes": [{"match": "node*/nic*", "factor": 0.125}], "strategy.micro_batch_size": 4}
four = [
    train("fsdp", slow, param_dtype="bf16", data_parallel_replicate_degree=r).summary["step_time_s"] for r in (1, 2)
]
assert np.isclose(keep.summary["bytes_sent_per_gpu"], sent["ZeRO-2"], rtol=0.04)
assert keep.memory.total > 1.5 * runs["FSDP"].memory.total
assert four[0] / four[1] < 1.1 < full[-1] / hybrid[-1]
