"""What is trained of a model: known counts of adapters, who gathers and reduces what, memory, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from player import toy_cost

from clustersim.app.cli import cli
from clustersim.core.errors import ModelError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective
from clustersim.core.ranges import of_step
from clustersim.model import model
from clustersim.model.adapter_setting import Adapter
from clustersim.model.adapters import Trained, with_trained
from clustersim.model.backward import linked
from clustersim.scenario import from_table
from clustersim.scenario.result.trust import trust
from clustersim.training.strategies.ddp import DDPConfig, buckets
from clustersim.training.strategies.zero import build
from clustersim.training.strategies.zero_config import ZeroConfig
from tests.evidence.adapter_rows import adapter_rows

ALL = ("all-linear",)
TABLE: dict[str, Any] = {
    "cluster": {"topology": "hgx-h100", "nodes": 1, "gpus_per_node": 1},
    "model": {
        "name": "llama3-8b",
        "seq_len": 1024,
        "dtype": "bf16",
        "adapter": {"rank": 16, "target_modules": ["q_proj", "v_proj"]},
    },
    "strategy": {"kind": "single"},
    "run": {"optimizer": "adamw", "optimizer_impl": "fused"},
}


def changed(**changes: Any) -> Any:
    return from_table(TABLE, changes={key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("name", "rank", "targets", "trained"),
    [
        # PEFT's own print_trainable_parameters, as published for these models.
        ("llama2-7b", 8, ("q_proj", "v_proj"), 4_194_304),
        ("llama3-8b", 16, ("q_proj", "v_proj"), 6_815_744),
        ("llama3-8b", 16, ALL, 41_943_040),
        ("llama2-13b", 64, ALL, 250_347_520),
    ],
)
def test_adapters_have_the_parameters_that_peft_prints(
    name: str, rank: int, targets: tuple[str, ...], trained: int
) -> None:
    adapted = with_trained(model(name), Trained((), Adapter(rank=rank, target_modules=targets), 2.0))
    assert adapted.trained == trained
    assert adapted.parameters == model(name).parameters + trained


def test_an_adapter_halves_the_backward_of_what_it_stands_beside() -> None:
    whole = model("llama3-8b", seq_len=512)
    adapted = with_trained(whole, Trained((), Adapter(rank=1, target_modules=("q_proj",)), 2.0))
    products = [
        sum(k.backward_flops for layer in made.layers[2:-1] for k in layer.kernels if k.kind == "gemm")
        for made in (whole, adapted)
    ]
    assert products[1] / products[0] == pytest.approx(0.5, rel=0.01)


def test_a_weight_of_4_bits_has_the_bits_of_the_paper() -> None:
    double = Adapter(rank=8, target_modules=ALL, load_in_4bit=True, bnb_4bit_use_double_quant=True)
    assert 8 * double.packed_bytes == pytest.approx(4.127, abs=5e-4)
    packed = with_trained(model("llama2-7b"), Trained((), double, 2.0))
    linears = sum(t.numel for layer in packed.layers for t in layer.tensors if t.quantised)
    assert linears == 6_476_005_376  # all but embedding, head and norms
    rest = model("llama2-7b").parameters - linears
    assert packed.frozen_bytes == pytest.approx(linears * double.packed_bytes + 2 * rest)


def test_nothing_flows_before_the_first_that_is_trained() -> None:
    whole = model("llama3-8b")
    first = with_trained(whole, Trained(("model.embed_tokens", "model.layers.[0-9]"), None, 4.0))
    assert [layer.has_backward for layer in first.layers[:12]] == [False] * 11 + [True]
    assert first.layers[11].kernels == whole.layers[11].kernels
    assert first.layers[10].frozen_bytes == 4 * whole.layers[10].parameters


def test_buckets_hold_what_is_trained() -> None:
    adapted = with_trained(model("llama3-8b"), Trained((), Adapter(rank=16, target_modules=ALL), 2.0))
    layout = buckets(adapted, DDPConfig(param_dtype="bf16"), 2)
    assert sum(bucket.numel for bucket in layout) == adapted.trained
    assert all(".lora_" in name for bucket in layout for name in bucket.names)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_reduces_what_is_trained_and_gathers_what_it_shares_out(stage: int) -> None:
    adapted = with_trained(model("gpt2"), Trained((), Adapter(rank=16, target_modules=("c_attn",)), 2.0))
    from msgspec import convert

    config = convert({"kind": "zero", "param_dtype": "bf16", "zero_optimization": {"stage": stage}}, ZeroConfig)
    program = build(adapted, toy_cost(adapted), Mesh(np.arange(8), 8), config, 1, 0)
    ops = [op for op in program.roles[0].ops if isinstance(op, Collective) and op.nbytes > 4]
    reduced = sum(op.nbytes for op in ops if op.kind in {"all_reduce", "reduce_scatter"})
    gathered = sum(op.nbytes for op in ops if op.kind == "all_gather")
    assert reduced == 2 * adapted.trained
    assert gathered == 2 * adapted.trained if stage < 3 else gathered > 2 * model("gpt2").parameters


def test_states_and_gradients_are_of_what_is_trained() -> None:
    prepared = changed().prepare()
    use = prepared.memory
    trained = prepared.model.trained
    assert use.optimizer_states == 2 * 4 * trained
    assert use.gradients == 4 * trained
    assert use.parameters == 2 * (prepared.model.parameters - trained) + 4 * trained


def test_four_bits_take_less_memory_and_more_time() -> None:
    plain = changed().prepare()
    packed = changed(model__adapter__load_in_4bit=True).prepare()
    assert packed.memory.parameters < 0.4 * plain.memory.parameters
    assert packed.cost.forward.sum() > 1.02 * plain.cost.forward.sum()
    # No gradients of weights; norms written out take 84 bytes an element backward for 36 forward.
    assert plain.cost.backward.sum() < 1.47 * plain.cost.forward.sum()


def test_memory_and_time_are_those_of_published_runs() -> None:
    """Their norms and rotation are fused kernels of flash-attention; of 256 tokens the host's calls take longest."""
    results = [(row, row.scenario().run()) for row in adapter_rows()]
    memory = [abs(result.memory.shown / row.memory - 1) for row, result in results]
    assert (median(memory), max(memory)) < (0.04, 0.12)
    seconds = [abs(row.seconds / result.summary["step_time_s"] - 1) for row, result in results]
    assert (median(seconds), max(seconds)) < (0.04, 0.135)  # 0.03 and 0.10 where an A100's cache spares nothing
    assert median(seconds) < of_step("adapters").p50
    trusted = trust(results[0][1].prepared)
    assert (trusted.rows, trusted.publishers) == (len(results), 1)


def test_modules_of_adapters_are_called_by_the_host() -> None:
    """Few tokens: each product of an adapter is a module to call, each of its other kernels a function in one."""
    changes = {"model__seq_len": 64, "model__adapter__target_modules": ["q_proj"], "strategy__param_dtype": "bf16"}
    one = changed(**changes).prepare().cost
    both = changed(**{**changes, "model__adapter__target_modules": ["q_proj", "v_proj"]}).prepare().cost
    compiled = {"model__implementation": "fused"}
    fused = [
        changed(**{**changes, **compiled, "model__adapter__target_modules": names}).prepare().cost
        for names in (["q_proj"], ["q_proj", "v_proj"])
    ]
    assert (one.forward_bound[2], both.forward_bound[2]) == ("launch", "launch")
    called = (both.forward_launch - one.forward_launch)[2] - (fused[1].forward_launch - fused[0].forward_launch)[2]
    assert called == pytest.approx((2 + 2 * 0.25) * 80e-6)


def test_a_run_says_what_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "lora.toml"
    path.write_text(
        '[cluster]\ntopology = "hgx-h100"\ngpus_per_node = 1\n[model]\nname = "gpt2"\ndtype = "bf16"\n'
        '[model.adapter]\nrank = 4\ntarget_modules = ["c_attn"]\n[strategy]\nkind = "single"\n'
    )
    answer = json.loads(CliRunner().invoke(cli, ["run", str(path), "--json"]).stdout)
    assert answer["trained_parameters"] == 12 * 4 * (768 + 2304)
    assert answer["parameters"] == 124_439_808 + answer["trained_parameters"]
    assert "147,456 trained (0.12%)" in CliRunner().invoke(cli, ["run", str(path)]).stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.adapter.target_modules": ["qproj"]}, "'qproj' names no linear; did you mean 'q_proj'?"),
        ({"model.adapter.target_modules": ["embed_tokens"]}, "adapters of experts and embeddings are not played"),
        ({"model.name": "mixtral-8x7b", "model.adapter.target_modules": ["w1"]}, "adapters of experts"),
        ({"model.name": "mixtral-8x7b", "model.adapter.load_in_4bit": True}, "load_in_4bit of experts is not played"),
        ({"strategy.kind": "parameter_server"}, "'parameter_server' does not play frozen parts; use one of 'single'"),
        ({"strategy.kind": "fsdp", "strategy.version": 1}, "use version = 2 (at $.strategy.version)"),
        (
            {"strategy.kind": "ddp", "cluster.gpus_per_node": 8, "parallel.framework": "nanotron", "parallel.tp": 2},
            "how nanotron divides adapters",
        ),
        ({"model.adapter.modules_to_save": ["lm_heads"]}, "did you mean 'lm_head'?"),
        ({"model.adapter.modules_to_save": ["q_proj"]}, "is in modules_to_save and has an adapter"),
        ({"model.adapter.bnb_4bit_use_double_quant": True}, "needs load_in_4bit = true"),
        ({"model.adapter.base_dtype": "fp4"}, "'fp4' must be 'bf16', 'fp16' or 'fp32'"),
        ({"model.frozen": ["model.norm"]}, "frozen is for a model without [model.adapter]"),
        ({"model.dtype": "fp8"}, 'dtype = "fp8" beside [model.adapter] is not played'),
        (
            {
                "strategy": {"kind": "zero", "param_dtype": "bf16", "zero_optimization": {"stage": 3}},
                "model.adapter.load_in_4bit": True,
            },
            "use fsdp",
        ),
    ],
)
def test_what_is_not_played_is_refused(changes: dict[str, Any], message: str) -> None:
    from clustersim.core.errors import ClusterSimError

    with pytest.raises(ClusterSimError) as error:
        from_table(TABLE, changes=changes).prepare()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "frozen", "message"),
    [
        ("llama3-8b", ("model.layer.0",), "no parameter is in 'model.layer.0' of frozen; did you mean 'model.layers.0"),
        ("llama3-8b", ("model", "lm_head"), "nothing is trained"),
        ("gpt2", ("lm_head",), "name both or neither"),
        ("resnet50", ("layer2",), "freeze whole layers from the first on"),
    ],
)
def test_patterns_that_freeze_nothing_or_too_much_are_refused(name: str, frozen: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelError) as error:
        with_trained(model(name), Trained(frozen))
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["phi3-mini-4k", "glm4-9b"])
def test_gate_and_up_in_one_tensor_are_its_products_and_down_is_of_its_own(name: str) -> None:
    """Its down projection has the gate's sizes, turned round; it is cut the other way."""
    block = next(layer for layer in model(name).layers if layer.kind == "block")
    links = {link.tensor.split(".", 3)[3]: link for link in linked(block).products}
    assert not linked(block).others
    products = {
        part: [block.kernels[i].name for i in links[f"mlp.{part}_proj.weight"].kernels] for part in ("gate_up", "down")
    }
    assert products == {"gate_up": ["gate", "up"], "down": ["down"]}
    assert links["mlp.gate_up_proj.weight"].n_out == 2 * links["mlp.down_proj.weight"].n_in


def test_products_in_4_bits_keep_their_inputs() -> None:
    """bitsandbytes' MatMul4Bit saves its input beside the weight, a frozen product in 16 bits none. The attention's
    output and what an adapter reads are there once."""
    kept = []
    for packed in (False, True):
        adapter = Adapter(rank=8, target_modules=("q_proj", "v_proj"), load_in_4bit=packed)
        made = with_trained(model("llama2-7b", seq_len=1024), Trained((), adapter, 2.0))
        kept.append(sum(kernel.saved for kernel in made.layers[5].kernels))
    # The norm's output that gate and up read, and what down reads.
    assert kept[1] - kept[0] == 1024 * (4096 + 11008)
