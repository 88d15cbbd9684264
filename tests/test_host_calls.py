"""What the host's calls cost a split model's step, what takes them away, and what measured steps say of them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import pytest

from clustersim import scenario
from clustersim.calibrate.score import read_table
from clustersim.core.device import device, paced
from clustersim.core.errors import ScenarioError
from clustersim.core.model import Kernel
from clustersim.core.texts import Table
from clustersim.explain.cause_kinds import cause_kinds
from clustersim.explain.stalls import causes, costliest
from clustersim.model.seconds.host import BY_EXPERT, PACE, POST, HostLaw, host_level
from clustersim.scenario.run.timed import informed
from clustersim.training.partition.recompute import input_dropped
from tests.evidence.expert_score import _step
from tests.evidence.hybrid_rows import STARVED
from tests.evidence.software import stack_of
from tests.evidence.step_rows import whole
from tests.evidence.validate_steps import _predict_hybrid

HYBRID = Path(__file__).parents[2] / "shared/measurements/training_steps_hybrid.csv"
LAYERS = 4
PASSES = 4
SMALL: Table = {
    "cluster": {"topology": "hgx-h100", "gpus_per_node": 2},
    "model": {
        "name": "gpt2",
        "seq_len": 256,
        "dtype": "bf16",
        "implementation": "fused",
        "options": {"layers": LAYERS, "d_model": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "d_ff": 2048},
    },
    "parallel": {"framework": "megatron", "tp": 2, "microbatches": PASSES},
    "strategy": {"kind": "ddp", "micro_batch_size": 1, "param_dtype": "bf16"},
    "run": {"steps": 2, "jitter": 0.0},
}


def _seconds(**changes: object) -> float:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return float(scenario.from_table(SMALL, "small.toml", named).run().summary["step_time_s"])


def _with(measured: Table) -> Table:
    return copy.deepcopy(SMALL) | {"measured": measured}


def seconds_of(law: HostLaw, name: str, kernels: tuple[Kernel, ...], part: str, called: set[tuple[str, ...]]) -> float:
    return sum(seconds for _, seconds in law.calls(name, kernels, part, called))


class TestHostLaw:
    def test_linears_that_read_one_tensor_are_one_module(self) -> None:
        law = HostLaw(call=100e-6, launch=10e-6, joined=True)
        q = Kernel("q", "gemm", m=8, n=8, k=8, flops=1.0, backward_flops=2.0, saved=8.0)
        k = replace(q, name="k", saved=0.0)
        assert seconds_of(law, "attention", (q, k), "F", set()) == pytest.approx(110e-6)
        assert seconds_of(HostLaw(100e-6, 10e-6), "attention", (q, k), "F", set()) == pytest.approx(220e-6)

    def test_a_linear_whose_input_is_made_again_is_called_as_one_that_keeps_it(self) -> None:
        law = HostLaw(call=100e-6, launch=10e-6, joined=True)
        q = Kernel("q", "gemm", m=8, n=8, k=8, flops=1.0, backward_flops=2.0, saved=8.0)
        both = (q, replace(q, name="k", saved=0.0))
        again = tuple(map(input_dropped, both))
        assert [kernel.saved for kernel in again] == [0.0, 0.0]
        for part in "FIW":
            assert (
                seconds_of(law, "attention", again, part, set())
                == seconds_of(law, "attention", both, part, set())
                > 0.0
            )

    def test_unfused_attention_is_one_module_whatever_it_launches(self) -> None:
        law = HostLaw(call=100e-6, launch=0.0)
        fused = seconds_of(law, "attention", (Kernel("attention", "attention"),), "F", set())
        unfused = [Kernel(name, "memory") for name in ("head_copies", "scores", "softmax", "context")]
        assert seconds_of(law, "attention", unfused, "F", set()) == pytest.approx(fused + 3 * POST * law.call)

    def test_a_graph_takes_its_modules_away_and_no_others(self) -> None:
        law = HostLaw(100e-6, 10e-6, graphs=("attn", "moe_router"))
        one = Kernel("norm_1", "memory")
        assert seconds_of(law, "attention", (one, one), "F", set()) == pytest.approx(law.call)  # the graph's own
        assert law.exchange("attention input", "all_gather") == 0.0
        assert seconds_of(law, "mlp", (one,), "F", set()) > law.call
        assert seconds_of(law, "moe", (Kernel("top_k", "memory"),), "F", set()) == pytest.approx(law.call)
        assert seconds_of(law, "moe", (Kernel("dispatch", "memory"),), "F", set()) > law.call

    @pytest.mark.parametrize("name", ["attention+moe+router", "router+moe+attention", "block"])
    @pytest.mark.parametrize(
        ("graphs", "replayed"),
        [
            (("attn",), {"norm_1", "q"}),
            (("moe_router",), {"norm_2", "router", "top_k"}),
            (("mlp",), set()),
            (("moe",), {"norm_2", "router", "top_k", "expert_up"}),
        ],
    )
    def test_a_graph_has_a_joined_works_kernels_by_what_they_are(
        self, name: str, graphs: tuple[str, ...], replayed: set[str]
    ) -> None:
        law = HostLaw(0.0, 10e-6, graphs=graphs)
        kernels = {kernel: Kernel(kernel, "memory") for kernel in ("norm_1", "q", "norm_2", "router", "top_k")}
        kernels["expert_up"] = expert = Kernel("expert_up", "gemm", cut="expert_column")
        without = seconds_of(law, name, (expert,), "F", set())
        free = {
            kernel for kernel, made in kernels.items() if seconds_of(law, name, (expert, made), "F", set()) == without
        }
        free -= {"expert_up"} if without else set()
        assert free == replayed

    def test_mamba_is_in_a_graph_of_its_own_and_embeddings_and_heads_in_none(self) -> None:
        law = HostLaw(0.0, 10e-6, graphs=("mamba", "mlp", "moe"))
        assert seconds_of(law, "mamba", (Kernel("norm_1", "memory"), Kernel("mamba_in", "gemm")), "F", set()) == 0.0
        assert seconds_of(law, "embedding", (Kernel("gather", "memory"),), "F", set()) > 0.0
        assert seconds_of(law, "head", (Kernel("logits", "gemm"),), "F", set()) > 0.0

    def test_a_grouped_product_is_launched_expert_by_expert_and_cast_as_often(self) -> None:
        up = Kernel("expert_up", "gemm", m=8, n=8, k=8, launches=1, cut="expert_column", repeat=16, saved=8.0)
        spent = {
            (each, part): seconds_of(HostLaw(0.0, 1.0, by_expert=each), "experts", (up,), part, set())
            for each in (0, *BY_EXPERT.values())
            for part in "FIW"
        }
        assert [spent[0, part] for part in "FIW"] == [1.0, 1.0, 1.0]
        assert [spent[BY_EXPERT[""], part] for part in "FIW"] == [16.0, 16.0, 16.0]
        assert [spent[BY_EXPERT["tensor"], part] for part in "FIW"] == [32.0, 32.0, 16.0]
        assert [spent[BY_EXPERT["blocks"], part] for part in "FIW"] == [48.0, 48.0, 32.0]
        looped = replace(up, launches=16)
        assert seconds_of(HostLaw(0.0, 1.0, by_expert=1), "experts", (looped,), "F", set()) == 16.0
        assert [host_level("megatron", "fused", scales=scales).by_expert for scales in BY_EXPERT] == [1, 2, 3]
        assert host_level("torchtitan", "fused").by_expert == 0

    def test_an_expert_in_8_bits_takes_the_host_what_transformer_engines_calls_were_timed_at(self) -> None:
        """NVIDIA/TransformerEngine pull request 3134: eight products of NVFP4 in 267 us, 128 tokens each, their scales
        in place; pull request 3137: a cast to MXFP8 in 16.4 to 20.0 us, on Grace."""
        up = Kernel("expert_up", "gemm", m=128, n=2048, k=2048, launches=1, cut="expert_column", repeat=8, saved=1.0)
        law = msgspec.structs.replace(
            host_level("megatron", "fused", scales="blocks"),
            call=0.0,
            launch=device("GB200").launch.value * PACE["grace"],
        )
        product = 267e-6
        cast = 8 * 18.2e-6
        assert seconds_of(law, "experts", (up,), "F", set()) == pytest.approx(product + cast, rel=0.1)
        assert seconds_of(law, "experts", (up,), "W", set()) == pytest.approx(product, rel=0.1)

    def test_an_unmeasured_stack_says_so(self) -> None:
        assert not host_level("torchtitan", "flash").known
        assert host_level("nanotron", "flash").known


class TestSteps:
    def test_the_width_does_not_matter_where_the_host_binds(self) -> None:
        wide = _seconds(model__options__d_ff=4096)
        assert wide == pytest.approx(_seconds(), rel=0.05)

    def test_graphs_and_larger_batches_end_it(self) -> None:
        bound = _seconds()
        assert _seconds(run__cuda_graph=["full_iteration"]) < 0.3 * bound
        assert _seconds(strategy__micro_batch_size=2) == pytest.approx(bound, rel=0.05)
        assert _seconds(strategy__micro_batch_size=1024) > 2 * bound

    def test_a_layer_takes_what_was_measured(self) -> None:
        once = _seconds(measured__layer_time="5 ms")
        assert _seconds(measured__layer_time="10 ms") - once == pytest.approx(5e-3 * LAYERS * PASSES, rel=0.1)

    def test_recomputation_calls_forward_again(self) -> None:
        plain = _seconds(measured__layer_time="9 ms")
        again = _seconds(measured__layer_time="9 ms", model__activation_checkpointing="full")
        assert 1.2 < again / plain < 1.6

    @pytest.mark.parametrize(("padded", "waited"), [(False, True), (True, False)])
    def test_what_is_called_behind_a_wait_is_never_ahead(self, padded: bool, waited: bool) -> None:
        """Kernels take longer than all calls; those behind a wait for counts are late all the same."""
        capacity = {"capacity_factor": 1.0, "pad_to_capacity": True} if padded else {}
        table = {
            "cluster": {"topology": "hgx-h100", "gpus_per_node": 8},
            "model": {
                "name": "mixtral-8x7b",
                "seq_len": 4096,
                "dtype": "bf16",
                "implementation": "fused",
                "options": {"layers": 3, "experts_implementation": "grouped_mm"},
            },
            "parallel": {"framework": "megatron", "ep": 8, "etp": 1, "microbatches": 4, **capacity},
            "strategy": {"kind": "ddp", "micro_batch_size": 1, "param_dtype": "bf16"},
            "run": {"steps": 2, "jitter": 0.0},
        }
        table["parallel"] |= {"dispatcher": "alltoall", "routing": {"kind": "balanced"}}
        usual, slow = (_step(json.dumps(table), level) for level in (0.25, 0.5))
        assert (slow > 1.002 * usual) == waited
        assert slow < 1.2 * usual

    def test_calls_hide_nothing_of_an_exchange_that_the_host_posts(self) -> None:
        """UCCL's messages over EFA take longer than NVSHMEM's by as much beside slow calls as beside quick ones."""
        table = {
            "cluster": {"topology": "aws-p5", "nodes": 2, "gpus_per_node": 8},
            "model": {
                "name": "qwen3-30b-a3b",
                "seq_len": 4096,
                "dtype": "bf16",
                "implementation": "fused",
                "options": {"layers": 2, "experts_implementation": "grouped_mm"},
            },
            "parallel": {"framework": "megatron", "ep": 16, "etp": 1, "microbatches": 4, "dispatcher": "flex"},
            "strategy": {"kind": "ddp", "micro_batch_size": 1, "param_dtype": "bf16"},
            "run": {"steps": 2, "jitter": 0.0},
        }
        longer = []
        for level in (0.25, 4.0):
            steps = []
            for backend in ("deepep", "uccl"):
                table["parallel"] |= {"routing": {"kind": "balanced"}, "flex_backend": backend}
                steps.append(_step(json.dumps(table), level))
            longer.append(steps[1] - steps[0])
        assert longer[1] == pytest.approx(longer[0], rel=0.02)
        assert longer[0] > 0.1 * steps[0]

    def test_a_slower_cpu_takes_longer(self) -> None:
        slow = _seconds(cluster__topology="dgx-a100", cluster__device="H100-SXM5-80GB")
        assert slow / _seconds() == pytest.approx(PACE["rome"], rel=0.1)

    def test_the_verdict_says_what_would_help(self) -> None:
        found = scenario.from_table(SMALL, "small.toml").run()
        assert "host-bound" in found.in_words
        assert "CUDA graphs" in found.in_words

    def test_a_bubble_that_costs_less_than_the_host_is_not_the_verdict(self) -> None:
        piped = SMALL | {"parallel": {"framework": "megatron", "pp": 2, "microbatches": 2 * PASSES}}
        found = scenario.from_table(piped, "small.toml").run()
        charged = causes(found.timeline)
        worst = costliest(charged, 1)[0]
        assert worst.cause == "calls"
        kind = cause_kinds(charged)[0]  # calls, and kernels that are shorter than their launch, have one remedy
        assert kind.first is worst
        assert f"{kind.share:.1%} of the step is lost (calling layers {charged.share(worst):.1%}, " in found.in_words
        assert ") because it is host-bound" in found.in_words


class TestMeasured:
    def test_a_host_bound_step_says_how_fast_the_host_is(self) -> None:
        usual = _seconds()
        found = informed(scenario.from_table(_with({"steps": [{"time": f"{1.5 * usual} s"}]}), "small.toml"))
        assert found.fit is not None
        assert found.fit.host == pytest.approx(1.5, rel=0.1)
        assert found.fit.kernels == pytest.approx(1.0, abs=0.03)
        assert found.fit.steps[0].fitted == pytest.approx(1.5 * usual, rel=0.03)

    def test_a_step_of_much_work_says_how_fast_kernels_are(self) -> None:
        step = {
            "set": {"strategy.micro_batch_size": 1024},
            "time": f"{1.1 * _seconds(strategy__micro_batch_size=1024)} s",
        }
        found = informed(scenario.from_table(_with({"steps": [step]}), "small.toml"))
        assert found.fit is not None
        assert found.fit.kernels == pytest.approx(1.1, rel=0.04)
        assert found.fit.host == pytest.approx(1.0, rel=0.05)

    def test_what_set_changes_is_not_of_the_measured_run(self) -> None:
        table = _with({"steps": [{"time": f"{1.5 * _seconds()} s"}]})
        more = scenario.from_table(table, "small.toml", {"parallel.microbatches": 2 * PASSES})
        here = scenario.from_table(table, "small.toml")
        assert informed(more).fit == informed(here).fit
        result = more.run()
        assert result.summary["step_time_s"] == pytest.approx(1.5 * _seconds(parallel__microbatches=8), rel=0.1)
        assert any(note.startswith("measured steps: ") for note in result.notes)

    def test_a_whole_model_is_informed_too(self) -> None:
        table = {name: part for name, part in SMALL.items() if name != "parallel"}
        table = copy.deepcopy(table)
        table["strategy"]["micro_batch_size"] = 128
        usual = scenario.from_table(table, "ddp.toml").run().summary["step_time_s"]
        table["measured"] = {"steps": [{"time": f"{1.2 * usual} s"}]}
        told = scenario.from_table(table, "ddp.toml").run()
        assert told.summary["step_time_s"] == pytest.approx(1.2 * usual, rel=0.06)

    def test_faster_than_peak_is_refused_with_the_bound(self) -> None:
        table = _with({"steps": [{"time": "1 us"}]})
        with pytest.raises(ScenarioError, match=r"faster than .* at peak \(at \$\.measured\.steps\[0\]\.time\)"):
            scenario.from_table(table, "small.toml").run()

    @pytest.mark.parametrize("measured", [{"layer_time": "0 s"}, {"steps": [{"time": "0 s"}]}, {"layers": "1 ms"}])
    def test_nonsense_is_refused(self, measured: Table) -> None:
        with pytest.raises(ScenarioError, match="measured"):
            scenario.from_table(_with(measured), "small.toml")

    def test_pace_leaves_the_peak_alone(self) -> None:
        card = device("H100-SXM5-80GB")
        slow = paced(card, 1.25, 2.0)
        assert slow.peak == card.peak
        assert slow.matmul_rate("bf16") == pytest.approx(card.matmul_rate("bf16") / 1.25)
        assert slow.launch.value == 2 * card.launch.value


@pytest.mark.shared
@pytest.mark.skipif(not HYBRID.is_file(), reason="no measurement tables beside the checkout")
class TestRows:
    def test_readers_know_the_software(self) -> None:
        rows = read_table(HYBRID, ())
        names = {row["case_id"].split("-")[0]: stack_of(row).name for row in rows if "gold" in row["case_id"]}
        assert names == {"mcoregold": "Megatron-LM's functional tests"}
        assert {stack_of(row).framework for row in rows if row["framework"] == "nanotron"} == {"nanotron"}

    @pytest.mark.parametrize(("source", "most"), [("nanotron", 0.20), ("mcoregold", 0.30)])
    def test_small_work_takes_its_host_time(self, source: str, most: float) -> None:
        """Rows inside one node, every so many of them; the same rows were 50 and 90 % too fast without calls."""
        rows = [
            row
            for row in read_table(HYBRID, ())
            if row["case_id"].startswith(source) and row["nodes"] == "1" and whole(row, "tp") > 1
            if not row["suspect"] and not row["experts"] and not STARVED.search(row["source"])
        ]
        errors = []
        for row in rows[:: max(1, len(rows) // 7)]:
            seen, predicted = _predict_hybrid(row)
            errors.append(abs(predicted / seen - 1))
        assert len(errors) > 5
        assert median(errors) < most, np.round(errors, 2)
