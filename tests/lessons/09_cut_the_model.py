"""What lesson 9 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

import math


def step_of(run):
    return run.summary["step_time_s"]


def waiting(run):
    return run.where[0].exposed["TP"] / step_of(run)


# By hand: the sum of both parts is the whole, and neither part alone is; the other way round needs two sums.
assert right < 1e-12 < 1.0 < min(wrong)
halves = [X[:, : h // 2] @ A[: h // 2], X[:, h // 2 :] @ A[h // 2 :]]
assert np.abs(act(halves[0]) + act(halves[1]) - act(X @ A)).max() > 1.0
assert np.allclose(act(sum(halves)), act(X @ A))

# What is cut how, and that all of it is an eighth.
cuts = {tensor.name.split(".")[-2]: tensor.cut for tensor in layer.tensors}
assert [name for name, cut in cuts.items() if cut == "row"] == ["o_proj", "down_proj"]
assert {name for name, cut in cuts.items() if cut == "sequence"} == {"input_layernorm", "post_attention_layernorm"}
norms = sum(tensor.numel for tensor in layer.tensors if tensor.cut == "sequence")
assert norms < 1e-4 * sum(tensor.numel for tensor in layer.tensors)

# Two sums in a layer's forward, two in its backward, each of every token.
sums = [op.name for op in eight.timeline.ops if op.kind == "all_reduce" and op.name.endswith("layers.10")]
assert len(sums) == 4
assert sum("gradient" in name for name in sums) == 2
assert (T, width, L) == (eight.prepared.model.seq_len, layer.tensors[-1].numel, len(eight.prepared.model.layers) - 2)
assert law < sent < 1.03 * law

# NVLink, PCIe, and the node's edge.
assert 4 < gain["hgx-a100"][-1] < 5.5
assert gain["pcie-a100"][-1] < 1.7
assert best == 4
assert [row["which is"] for row in rows] == sorted(row["which is"] for row in rows)
assert 1.6 < rows[-1]["waiting for sums"] / rows[-2]["waiting for sums"] < 2.6
assert 1.0 < last[0] / last[1] < 1.3

# Sequence parallelism: less memory, a quarter more traffic, about the same time.
assert kept[1] < 0.45 * kept[0]
assert math.isclose(moved[1] / moved[0], 1.25, rel_tol=0.01)
assert math.isclose(took[0], took[1], rel_tol=0.03)
for n in (2, 4, 8):
    assert held[f"tp {n}, cut by tokens"]["activations"] < held[f"tp {n}, whole"]["activations"]

# The knob: the share hardly moves.
shares = [waiting(train(8, True, **knob)) for knob in ({}, {"model.seq_len": 8192}, {"strategy.micro_batch_size": 2})]
assert max(shares) - min(shares) < 0.03

# The first exercise.
large = train(8, True, **{"model.name": "llama3-70b"})
assert not large.fits
assert 0.5 < waiting(large) / waiting(train(8, True)) < 0.65

# The second.
for seq_len, longer in ((4096, True), (16384, False)):
    plain, cut = (
        train(8, True, "hgx-h100", **{"model.seq_len": seq_len, "parallel.tp_overlap": overlap})
        for overlap in ("none", "async_tp")
    )
    assert waiting(cut) < 0.35 * waiting(plain)
    assert (step_of(cut) > step_of(plain)) is longer
