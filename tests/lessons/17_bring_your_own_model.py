"""What lesson 17 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

# One formula, written twice: the same parameters and FLOPs, ten times the bytes of the norms, and a longer step.
plain, by_hand = (traced[name] for name in TRACED)
assert plain.parameters == by_hand.parameters
assert plain.flops_per_sample() == by_hand.flops_per_sample()
assert norms(by_hand)[0] > 8 * norms(plain)[0]
assert norms(by_hand)[1] > 8 * norms(plain)[1]
assert 0.2 < longer < 0.35

# The products are two FLOPs a weight and token, the convolution hardly any.
assert abs(products / (2 * weights * mixer.seq_len) - 1) < 1e-9
assert mixing.flops < 0.001 * products
assert mixing.flops == 2 * (mixer.seq_len + 3) * mixer.hidden * 4
assert mixing.backward_flops == 2 * mixing.flops

# Memory follows, and recomputation costs a forward; 512 GPUs hide what they exchange.
totals = {name: sum(parts.values()) for name, parts in moments.items()}
assert totals["PyTorch's norm, recomputed"] < 0.3 * totals["PyTorch's norm"]
assert totals["by hand"] > 1.2 * totals["PyTorch's norm"]
assert 0.19 < dearer < 1 / 3
assert 0 < large / small - 1 < 0.15

# A damaged config is read right or refused; nothing that moves the answer is assumed.
counts = {name: answer["parameters"] for name, answer in answers.items()}
assert counts["as published"] == counts["the count of experts under another of its names"] == "30,532,122,624"
refused = [name for name, count in counts.items() if count == "refused"]
assert refused == list(damaged)[2:6]
assert "'num_experts'" in answers["no count of experts"]["what is said"]
assert "did you mean 'hidden_dim'" in answers["a name that nobody has"]["what is said"]
assert "tie_word_embeddings" in answers["no word on tying"]["what is said"]
assert sizes[128] > 8 * sizes[8]

# What a trace does not say is refused; a chain of blocks is cut into stages.
assert [name for name, answer in said.items() if answer.endswith("a step")] == ["pipeline parallelism"]

# The second exercise; the first is tests/test_tracing_fused.py's, where torch is.
twice = model.from_hf(without(num_experts_per_tok=16), seq_len=4096)
once = model.from_hf(published, seq_len=4096)
assert twice.parameters == once.parameters
assert 1.2 < twice.flops_per_sample() / once.flops_per_sample() < 1.5
