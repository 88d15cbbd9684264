"""Adapters and frozen parts in a split model: exchanges, products, gradients and memory, counted by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from partitions import exchanges

from clustersim.core.errors import ClusterSimError
from clustersim.core.model import Model
from clustersim.core.program import Collective
from clustersim.model import model
from clustersim.model.adapter_setting import Adapter
from clustersim.model.adapters import Trained, with_trained
from clustersim.model.seconds.kernels import flops
from clustersim.scenario import from_table
from clustersim.training.parallel import ParallelConfig
from clustersim.training.partition import Work, partition
from clustersim.training.partition.base import Item, LocalLayer

S, H, Q, KV, F, R = 1024, 4096, 4096, 1024, 14336, 16  # of Llama-3-8B at 1,024 tokens, with adapters of rank 16
TABLE: dict[str, Any] = {
    "cluster": {"topology": "hgx-h100", "nodes": 1, "gpus_per_node": 8},
    "model": {
        "name": "llama3-8b",
        "seq_len": S,
        "dtype": "bf16",
        "implementation": "fused",
        "options": {"layers": 4},
        "adapter": {"rank": R, "target_modules": ["linear_qkv", "linear_proj"]},
    },
    "strategy": {"kind": "ddp"},
    "parallel": {"framework": "megatron", "tp": 4, "sequence_parallel": True},
    "run": {"optimizer": "adamw"},
}


def adapted(*targets: str, **how: Any) -> Model:
    whole = model("llama3-8b", seq_len=S, layers=4)
    return with_trained(whole, Trained((), Adapter(rank=R, target_modules=targets, **how), 2.0))


def blocks(whole: Model, **degrees: Any) -> list[LocalLayer]:
    split = partition(whole, ParallelConfig(framework="megatron", **degrees))
    return [layer for stage in split.stages for layer in stage.layers if layer.kind == "block"]


def moved(items: tuple[Item, ...]) -> Counter[tuple[str, float]]:
    return Counter((x.kind, x.elements) for x in exchanges(items))


def executed(items: tuple[Item, ...], part: str, ends: tuple[str, ...] = ("",)) -> float:
    works = (item for item in items if isinstance(item, Work) and item.part == part)
    return sum(flops(k, part) for work in works for k in work.kernels if k.kind == "gemm" and k.name.endswith(ends))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_adapters_add_the_exchanges_of_megatron_bridge(sequence_parallel: bool) -> None:
    """Beside qkv: the low rank gathered, its gradient summed; without sequence parallelism the gradient of the input is
    summed once more. Beside proj: the low rank summed, the output gathered; its gradient, with sequence parallelism."""
    block = blocks(adapted("linear_qkv", "linear_proj"), tp=4, sequence_parallel=sequence_parallel)[2]
    plain = blocks(model("llama3-8b", seq_len=S, layers=4), tp=4, sequence_parallel=sequence_parallel)[2]
    ahead = moved(block.forward) - moved(plain.forward)
    back = moved(block.backward)
    low = float(S * R)
    full = float(S * H)
    assert ahead == Counter({("all_gather", low): 1, ("all_reduce", low): 1, ("all_gather", full): 1})
    if sequence_parallel:
        # 2 gathers of gradients and 2 reduce_scatters are left of 4 and 2: no weight needs its input again.
        want = {("all_gather", full): 3, ("reduce_scatter", full): 2, ("all_reduce", low): 2}
    else:
        want = {("all_reduce", full): 3, ("all_reduce", low): 2}
    assert back == Counter(want)


def test_weights_of_adapters_alone_have_a_gradient() -> None:
    block = blocks(adapted("linear_qkv", "linear_proj"), tp=4, sequence_parallel=True)[2]
    base = 2 * S * (H * (Q + 2 * KV) + Q * H + 3 * H * F) / 4
    # Each product of an adapter is cut in 4, beside linears cut by columns and by rows.
    beside = 2 * S * R * (H + (Q + 2 * KV) + Q + H) / 4
    assert executed(block.forward, "F") == base + beside
    assert executed(block.backward, "I") == base + beside
    assert executed(block.backward, "W") == beside


def test_one_adapter_stands_beside_megatrons_linear_and_several_beside_its_parts() -> None:
    joined = adapted("linear_qkv")
    apart = adapted("q_proj", "k_proj", "v_proj")
    assert adapted("linear_q", "linear_k", "linear_v").trained == apart.trained
    assert joined.trained == 4 * R * (H + Q + 2 * KV)
    assert apart.trained == joined.trained + 4 * 2 * R * H
    names = [t.name for t in joined.layers[1].tensors if not t.frozen]
    assert names == [f"model.layers.0.self_attn.linear_qkv.lora_{x}.weight" for x in "AB"]


def test_an_adapter_keeps_the_whole_input_that_its_linear_has_gathered() -> None:
    block = blocks(adapted("linear_qkv", "linear_proj"), tp=4, sequence_parallel=True)[2]
    # Of qkv the gathered input and the low rank; of proj 1/4 of the input and the low rank.
    assert block.kept_for_weights == S * H + S * R + S * Q / 4 + S * R


def test_nothing_flows_back_below_the_first_adapter() -> None:
    first, second = blocks(adapted("linear_proj"), tp=4, sequence_parallel=True)[:2]
    full = float(S * H)
    # Of the first block neither qkv nor attention has a backward: one reduce_scatter, of the second half.
    assert moved(first.backward)[("reduce_scatter", full)] == 1
    assert moved(second.backward)[("reduce_scatter", full)] == 2
    names = {k.name for item in first.backward if isinstance(item, Work) for k in item.kernels}
    assert "attention" not in names
    assert "proj_lora_A" in names
    embedding = partition(adapted("linear_proj"), ParallelConfig(tp=4)).stages[0].layers[0]
    assert embedding.backward == ()
    again = with_trained(
        model("llama3-8b", seq_len=S, layers=4),
        Trained((), Adapter(rank=R, target_modules=("linear_proj",)), 2.0, to_blocks=True),
    )
    assert moved(blocks(again, tp=4, sequence_parallel=True)[0].backward) == moved(second.backward)


@pytest.mark.parametrize("degrees", [{}, {"pp": 2}, {"tp": 4}, {"tp": 2, "pp": 2, "sequence_parallel": True}])
def test_ranks_together_do_what_a_whole_model_does(degrees: dict[str, Any]) -> None:
    whole = adapted("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    split = partition(whole, ParallelConfig(framework="megatron", **degrees))
    layers = [layer for stage in split.stages for layer in stage.layers]
    tp = degrees.get("tp", 1)
    products = [k for layer in whole.layers for k in layer.kernels if k.kind == "gemm" and layer.kind == "block"]
    ours = [layer for layer in layers if layer.kind == "block"]
    assert tp * sum(executed(x.forward, "F") for x in ours) == sum(k.flops for k in products)
    back = sum(executed(x.backward, "I") + executed(x.backward, "W") for x in ours)
    assert tp * back == sum(k.backward_flops for k in products)
    assert tp * sum(layer.trained for layer in layers) == whole.trained
    # Embedding and head are padded to what tensor parallelism divides.
    norms = sum(t.numel * 2 for layer in whole.layers for t in layer.tensors if t.width == 1 and layer.kind == "block")
    frozen = sum(layer.frozen_bytes for layer in whole.layers if layer.kind == "block")
    assert tp * (sum(layer.frozen_bytes for layer in ours) - norms) == frozen - norms
    assert not any(layer.replicated for layer in layers)


def test_a_stage_reduces_and_updates_what_is_trained() -> None:
    prepared = from_table(TABLE, changes={"parallel.pp": 2, "parallel.tp": 2}).prepare()
    trained = 2 * R * (H + Q + 2 * KV + Q + H) // 2  # of two blocks, on each of two tensor-parallel ranks
    for role in prepared.program.roles:
        ops = [op for op in role.ops if isinstance(op, Collective) and op.communicator == "dp-cp" and op.step == 0]
        reduced = sum(op.nbytes for op in ops if op.kind in {"all_reduce", "reduce_scatter"})
        assert reduced == 4 * trained
        assert not any("replicated" in op.name or "tied" in op.name for op in role.ops)
    use = prepared.memory
    assert use.gradients == 4 * trained
    assert use.optimizer_states == 8 * trained
    assert use.master_weights == 4 * trained


def test_a_distributed_optimizer_shares_out_adapters() -> None:
    changes = {"parallel.tp": 2, "parallel.use_distributed_optimizer": True}
    use = from_table(TABLE, changes=changes).prepare().memory
    trained = 4 * R * (H + Q + 2 * KV + Q + H) // 2
    frozen = use.parameters - 2 * trained
    assert use.optimizer_states == 8 * trained / 4
    whole = model("llama3-8b", layers=4)
    norms = 9 * H
    assert frozen == pytest.approx(2 * ((whole.parameters - norms) / 2 + norms), rel=1e-9)


def test_weights_of_4_bits_are_written_out_for_every_pass() -> None:
    changes: dict[str, Any] = {
        "parallel": {"framework": "megatron", "pp": 2},
        "strategy.gradient_accumulation_steps": 4,
        "run.cuda_graph": ["full_iteration"],  # where the host binds, it hides kernels
    }
    plain = from_table(TABLE, changes=changes)
    packed = from_table(TABLE, changes=changes | {"model.adapter.load_in_4bit": True})
    slower, faster = (float(one.run().summary["step_time_s"]) for one in (packed, plain))
    read = 2 * (H * (Q + 2 * KV) + Q * H + 3 * H * F)  # of the two blocks of a stage
    least = 4 * 2 * read * (2 + 0.5) / 3.35e12  # 4 micro-batches, forward and backward, at the sheet's bandwidth
    assert slower - faster > least
    assert packed.prepare().memory.parameters < plain.prepare().memory.parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.framework": "torchtitan"}, "how torchtitan divides adapters"),
        ({"model.adapter.load_in_4bit": True}, "linears of 4 bits (bitsandbytes) are not cut"),
        ({"strategy": {"kind": "fsdp"}}, "not with FSDP or ZeRO stages 2 and 3"),
        ({"model.adapter.rank": 6}, "tp = 4 does not divide the 6 columns of 'qkv_lora_A'"),
        ({"model.adapter.target_modules": ["lm_head"]}, "an adapter beside 'logits', which is not cut by columns"),
        ({"model.adapter.target_modules": ["linear_qkv", "q_proj"]}, "once more; leave one name out"),
        (
            {"parallel.recompute_granularity": "selective", "parallel.recompute_modules": ["mlp"]},
            "recompute of mlp: what these keep beside frozen products is not described",
        ),
        (
            {"model.adapter": None, "model.frozen": ["model.embed_tokens", "model.layers.[01]"], "parallel.pp": 2},
            "trains nothing: a pipeline whose backward ends behind it is not played",
        ),
    ],
)
def test_what_is_not_played_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterSimError) as error:
        from_table(TABLE, changes=changes).prepare()
    assert message in str(error.value)


def test_a_mixture_of_experts_may_be_frozen_beside_adapters_of_its_attention() -> None:
    table = {**TABLE, "model": {**TABLE["model"], "name": "mixtral-8x7b", "options": {}, "implementation": "fused"}}
    parallel = {"framework": "megatron", "tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True}
    prepared = from_table(table, changes={"parallel": parallel, "model.options.layers": 2}).prepare()
    assert not any("expert gradients" in op.name for role in prepared.program.roles for op in role.ops)
    with pytest.raises(ClusterSimError) as error:
        from_table(table, changes={"parallel": parallel, "model.adapter.target_modules": ["linear_fc1"]}).prepare()
    assert "adapters beside experts, too, which are not played" in str(error.value)
