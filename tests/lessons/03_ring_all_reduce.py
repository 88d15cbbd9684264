"""What lesson 3 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

assert (states[-1] == sums).all()  # every GPU (row) has every sum
assert all(states[N - 1][g, g] == sums[g] for g in range(N))  # half way: GPU g has sum g, finished
assert all(len({sender for sender, *_ in step}) == N for step in reduce_scatter + all_gather)  # all links, each once

assert played == {move for step in reduce_scatter + all_gather for move in step}

assert np.allclose(sent, law)

assert np.isclose(by_name["direct"]["total_bytes"], 64 * 63 * Z)
assert np.isclose(by_name["ring_unsplit"]["busiest_bytes"], 63 * Z)
assert by_name["ring"]["seconds"] == fastest

assert small > 2
assert large > 1

assert chosen[0]["algorithm"] == "tree"
assert chosen[-1]["algorithm"] == "ring"

assert np.isclose(alone["reduce_scatter"] + alone["all_gather"], alone["all_reduce"], rtol=0.1)
assert alone["barrier"] < 1e-3 < alone["all_to_all"]

# What the answers rest on.
latency = by_size["ring"][0]
enough = next(size for size, seconds in zip(sizes, by_size["ring"], strict=True) if seconds >= 10 * latency)
assert 2**20 <= enough <= 25 * 2**20  # bucket_cap_mb = 25
