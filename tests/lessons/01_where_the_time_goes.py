"""What lesson 1 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

assert all(row["GPU"] == f"node{row['NODE_RANK']}/gpu{row['LOCAL_RANK']}" for row in where)

assert np.isclose(sum(seconds.values()), step, rtol=1e-6)  # every instant is in one state: nothing is lost
assert seconds["exposed transfer"] + seconds["waiting for a peer"] > 0.75 * step

assert ring_step < step / 4

assert np.isclose(ddp.summary["bytes_sent_per_gpu"], ring.summary["bytes_sent_per_gpu"], rtol=1e-3)
assert ddp.summary["exposed_communication_s"] < 0.2 * ring.summary["exposed_communication_s"]

assert fsdp.memory.model_states < ddp.memory.model_states / 3

assert all(row["bubble"] == 0 for row in rows)


# What the answers rest on.
def step_of(changes):
    return clustersim.load(CLUSTER, changes).run().summary["step_time_s"]


two = {"kind": "parameter_server", "server": "cpu", "servers": 2, "micro_batch_size": 2}

ratio = {name: step_of({**run.scenario.changes, **SLOW}) / run.summary["step_time_s"] for name, run in runs.items()}

large = clustersim.load(CLUSTER, {"strategy.micro_batch_size": 8, **SLOW}).run()
assert np.isclose(step_of({"strategy": two}), step, rtol=0.05)
assert np.isclose(step_of({"strategy": {**two, "sharding": "even"}}), step / 2, rtol=0.05)
assert sorted(ratio, key=ratio.get) == ["DDP", "ring, after backward", "parameter server", "FSDP"]
assert per_step(large.timeline)["exposed transfer"] < 0.2 * large.summary["step_time_s"]
