"""Kinds of files that a person may give, each with the commands that read it: what ``tests/fuzz.py`` plays."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

from hostile_documents import (
    CAMPAIGN,
    CAPTURED,
    COMMS,
    CONFIG,
    DEVICE,
    LOG,
    MODEL_FILE,
    MOE_CONFIG,
    NCCL_TABLE,
    PLAN,
    ROUTING,
    SCENARIO,
    SCHEDULE,
    SPLIT,
    SWEEP,
    TOPOLOGY,
    TRACE,
    TRACED,
)
from hostile_files import (
    DATA,
    SLOW,
    Kind,
    answered,
    lines,
    members,
    nsys,
    rows,
    saved,
    spreadsheet,
    table,
    with_table,
)
from hostile_found import found_kinds
from hostile_launch import launch_files, machine_kinds, page_kinds
from hostile_values import NASTY, damaged, documents, json_file, tables, toml_file
from hypothesis import strategies as st
from test_traces_kernel_csv import ROCPROF, ROCPROF_SUMS, SUMS
from test_traces_kernel_csv import TRACE as GPU_TRACE

SETS = st.tuples(
    st.sampled_from(
        [f"{a}.{b}" for a, t in SCENARIO.items() for b in t] + ["a.b", "run", "", "x" * 3000, "run.steps.x"]
    ),
    st.one_of(NASTY.map(str), st.sampled_from(["[", "{", '"', "'''", "[[[[" * 1000, "9" * 6000, "1\n2", "0xfg"])),
).map("=".join)
WORDS = st.one_of(
    NASTY.map(str),
    st.sampled_from(
        ["0-7", "1", "0", "-1", "1 ms..2 ms", "8 MiB", "last", "1e9", "1 GB/s", "16GiB", "ring", "1us..1e9s"]
    ),
).filter(lambda word: "\0" not in word)
"""What stands behind an option: no system hands a NUL to a program."""
READ = ("run {} --json", "run {} --json", "run {} --json", "memory {}", "describe {}", "memory {}", "explain {}")
"""What reads a scenario; to explain it takes ten runs."""
SPLIT_READ = ("run split.toml --json", "describe split.toml", "memory split.toml")
TRACES = ("trace {} --json", "replay {} --json")
LAYOUTS = (
    st.text("Etm|L*(),0123456789 ", max_size=30)
    | st.lists(st.integers(-1, 4), max_size=6)
    | st.sampled_from(["Et|tttL", "Ett|ttL", "E|tttt|L", "Etttt|L", "Et*2|t*2L", "Ettt|tL|"])
)


def settings(base: dict[str, Any], at: str, struct: Any, **usual: Any) -> Any:
    """TOML files made from one, with fields of a table drawn from its schema."""
    return damaged(with_table(base, at, tables(struct, usual, base.get(at, ()))).map(toml_file), 40)


def split_with(**more: Any) -> dict[str, Any]:
    """A scenario of a split model with more in its ``[parallel]``."""
    return SPLIT | {"parallel": SPLIT["parallel"] | more}


def kinds() -> dict[str, Kind]:
    """Every kind of file."""
    return {
        **_scenarios(),
        **_split(),
        **_studies(),
        **_measured(),
        **_ours(),
        **_words(),
        **launch_files(),
        **page_kinds(),
        **machine_kinds(),
        **found_kinds(),
    }


def _scenarios() -> dict[str, Kind]:
    from clustersim.core.variation import Variation
    from clustersim.scenario.file.campaign_schema import CampaignTable
    from clustersim.scenario.file.schema import Cluster, Model, Run
    from clustersim.training.strategies import STRATEGIES

    sizes = {"micro_batch_size": st.sampled_from([1, 2, 8])}
    strategies = st.sampled_from(sorted(STRATEGIES)).flatmap(
        lambda kind: tables(STRATEGIES[kind].config, sizes).map(lambda table: {"kind": kind} | table)
    )
    chosen = {"hf_config": st.just("config.json"), "file": st.none(), "name": st.none(), "nodes": st.integers(1, 4)}
    campaign = SCENARIO | {"campaign": CAMPAIGN}
    played = "campaign {} --replicas 3 --jobs 1 --json"
    return {
        "scenario": Kind("mine.toml", table(SCENARIO), READ),
        "cluster": Kind("mine.toml", settings(SCENARIO, "cluster", Cluster, topology=st.just("dgx-1v")), READ),
        "model": Kind("mine.toml", settings(SCENARIO, "model", Model, **chosen), READ),
        "strategy": Kind("mine.toml", damaged(with_table(SCENARIO, "strategy", strategies).map(toml_file), 40), READ),
        "run table": Kind("mine.toml", settings(SCENARIO, "run", Run, steps=st.integers(1, 5)), READ),
        "campaign": Kind(
            "mine.toml", settings(campaign, "campaign", CampaignTable), (played, f"{played} --out out"), share=SLOW
        ),
        "campaign file": Kind("mine.toml", table(campaign), (played,)),
        "variation": Kind(
            "mine.toml",
            settings(SCENARIO | {"run": {"steps": 1}}, "run.variation", Variation),
            ("run {} --json", "variation {} --machines 2 --steps 3 --budget 1 --json"),
        ),
    }


def _split() -> dict[str, Kind]:
    from clustersim.training.parallel import ParallelConfig
    from clustersim.training.parallel.config import Routing

    def beside(**more: Any) -> Callable[[], dict[str, bytes]]:
        return lambda: {"split.toml": toml_file(split_with(**more))}

    chosen = {
        "layout": LAYOUTS,
        "routing": tables(Routing, {"file": st.just("routing.csv"), "seed": st.integers(-2, 9)}),
        "schedule_csv": st.just("schedule.csv"),
        "schedule": st.sampled_from(["1f1b", "gpipe", "interleaved", "zb_h1", "zbv", "dualpipe", "x"]),
    }
    layouts = damaged(LAYOUTS.map(lambda one: toml_file(split_with(layout=one))), 40)
    names = st.sampled_from([f"parallel.{name}" for name in ParallelConfig.__struct_fields__])
    return {
        "parallel": Kind("mine.toml", settings(SPLIT, "parallel", ParallelConfig, **chosen), READ),
        "layout": Kind("mine.toml", layouts, READ),
        "schedule": Kind("schedule.csv", spreadsheet(SCHEDULE), SPLIT_READ, beside(schedule_csv="schedule.csv")),
        "routing": Kind(
            "routing.csv",
            spreadsheet(ROUTING),
            SPLIT_READ,
            beside(routing={"kind": "histogram", "file": "routing.csv"}),
        ),
        "moe config": Kind("moe.json", damaged(documents(MOE_CONFIG).map(json_file)), SPLIT_READ),
        "split set": Kind(
            "mine.toml",
            st.just(toml_file(SPLIT)),
            ("run {} --json --set <>",),
            words=st.tuples(names, WORDS).map("=".join),
        ),
    }


def _studies() -> dict[str, Kind]:
    from clustersim.training.parallel import ParallelConfig

    tried = PLAN | {
        "model": SPLIT["model"],
        "machines": [{"topology": "hgx-a100", "nodes": [1]}],
        "try": {"micro_batch_size": [1], "strategies": [{"kind": "ddp"}], "parallel": {"pp": [1, 2], "ep": "search"}},
    }
    return {
        "topology": Kind(
            "mine.toml",
            table(TOPOLOGY),
            (
                "check {}",
                "run gpt.toml --json --set cluster.topology=mine.toml",
                "collective all_reduce --size 1MiB --json --topology {}",
            ),
        ),
        "device": Kind(
            "gpu.toml",
            table(DEVICE),
            (
                "check {}",
                "run gpt.toml --gpu {} --json",
                "new scenario made.toml --model gpt2 --nodes 1 --gpu {}",
                "new topology made.toml --gpu {} --nics 4x400Gb/s",
            ),
        ),
        "drawn": Kind(
            "mine.toml", table(TOPOLOGY), ("plot topology {} p.svg", "plot topology {} p.png --nodes 3"), share=SLOW
        ),
        "exported": Kind(
            "mine.toml",
            settings(SPLIT, "parallel", ParallelConfig),
            tuple(
                f"export-config {{}} --to {to}"
                for to in (
                    "megatron --json",
                    "torchtitan -o l.toml",
                    "deepspeed --json",
                    "megatron -o l.sh",
                    "accelerate -o l.yaml",
                )
            ),
        ),
        "sweep": Kind("sweep.toml", table(SWEEP), ("sweep {} --out out --jobs 1",), share=SLOW),
        "plan": Kind("plan.toml", table(PLAN), ("plan {} --out out --jobs 1",), share=SLOW),
        "split plan": Kind("plan.toml", table(tried), ("plan {} --out out --jobs 1",), share=SLOW),
        "model file": Kind(
            "mine.model.json",
            damaged(documents(MODEL_FILE).map(json_file)),
            ("run traced.toml --json", "memory traced.toml", "run traced.toml --set parallel.pp=2 --json"),
            lambda: {"traced.toml": toml_file(TRACED)},
        ),
        "config": Kind(
            "config.json", damaged(documents(CONFIG).map(json_file)), ("run gpt.toml --json", "memory gpt.toml")
        ),
    }


def _measured() -> dict[str, Kind]:
    pipeline = {
        f"folder/{name}": (DATA / "traces" / "pipeline_2x2" / name).read_bytes() for name in ("ops.csv", "steps.csv")
    }
    kineto = gzip.decompress((DATA / "traces" / "gloo_2_ranks" / "rank0.json.gz").read_bytes())
    told = {name: (DATA / "traces" / "gloo_et" / f"{name}.json.gz").read_bytes() for name in ("et0", "rank0")}
    folder = ("trace folder --json", "replay folder --json")
    calibrate = "calibrate {} -o fitted.toml --topology"
    return {
        "trace": Kind("trace.json", damaged(documents(TRACE).map(json_file)), TRACES),
        "kineto": Kind("rank0.json", damaged(st.just(kineto)), TRACES),
        "execution": Kind(
            "folder/et0.json",
            damaged(st.just(gzip.decompress(told["et0"]))),
            folder,
            lambda: {"folder/rank0.json.gz": told["rank0"]},
        ),
        **{name: Kind(name, spreadsheet(text), folder, lambda: pipeline) for name, text in pipeline.items()},
        "nsys": Kind("p.sqlite", damaged(st.builds(nsys, NASTY, NASTY)), TRACES),
        "nsys csv": Kind("t.csv", spreadsheet(GPU_TRACE.encode()), TRACES),
        "nsys sums": Kind("t.csv", spreadsheet(SUMS.encode()), ("trace {} --json",)),
        "rocprof csv": Kind("t.csv", spreadsheet(ROCPROF.encode()), TRACES),
        "rocprof sums": Kind("t.csv", spreadsheet(ROCPROF_SUMS.encode()), ("trace {} --json",)),
        "log": Kind("nccl.log", damaged(st.just(LOG.encode())), ("trace {} --json", "validate nccl {}")),
        "comms": Kind("comms.log", damaged(st.just(COMMS)), ("trace {} --json",)),
        "captured": Kind(
            "folder/collectives.jsonl",
            lines(CAPTURED),
            (
                "trace {} --json",
                "validate capture folder --topology hgx-a100",
                "calibrate folder -o f --topology dgx-1v",
                f"{calibrate} hgx-a100",
            ),
        ),
        "nccl table": Kind(
            "t.csv", spreadsheet(NCCL_TABLE), ("validate nccl {} --json", "trace {} --json", f"{calibrate} hgx-h100")
        ),
        "hybrid": Kind(
            "t.csv",
            spreadsheet((DATA / "hybrid_steps.csv").read_bytes()),
            ("validate steps {} --json", "validate memory {} --json"),
        ),
        "table": Kind("spans.csv", damaged(st.just(b"rank,op,name\n0,1,x\n" + LOG.encode())), ("trace {}",)),
    }


def _ours() -> dict[str, Kind]:
    swept = "sweep @sweep.toml --jobs 1"
    table = ("report .", "export . t.csv")
    return {
        "run": Kind(
            "run.npz",
            damaged(st.deferred(lambda: st.just(saved()))),
            ("report {}", "explain {}", "trace {}"),
            share=SLOW,
        ),
        "members": Kind(
            "run.npz",
            members(),
            (
                "report .",
                "explain .",
                "export . spans.csv",
                "export . t.json.gz",
                "plot gantt . p.png --dpi 40",
                "plot links . p.svg",
                "compare . . --json",
            ),
        ),
        "rows": Kind(
            "results.jsonl",
            damaged(st.just(rows() * 2)),
            ("sweep sweep.toml --out . --jobs 1", "export . t.csv"),
            share=SLOW,
            ours=frozenset({"results.jsonl"}),
        ),
        "swept": answered(swept, "results.jsonl", *table),
        "cases": answered(swept, "cases.jsonl", *table),
        "swept words": answered(swept, "sweep.json", *table),
        "planned": answered(
            "plan @plan.toml --jobs 1",
            "plan.json",
            "report .",
            "export-config . --to megatron --json",
            "export-config . --to deepspeed --option 1",
        ),
        "played": answered("campaign @mine.toml --replicas 3 --jobs 1", "campaign.json", "report ."),
        "manifest": answered(
            swept,
            "clustersim.json",
            "report .",
            "run mine.toml --out .",
            "sweep sweep.toml --out . --jobs 1",
            "lessons .",
            "campaign mine.toml --out .",
        ),
    }


def _words() -> dict[str, Kind]:
    collective = "collective all_reduce --topology dgx-1v"
    plot = "plot gantt . p.svg"
    return {
        "set": Kind("mine.toml", st.just(toml_file(SCENARIO)), ("run {} --json --set <>",), words=SETS),
        "words": Kind(
            "run.npz",
            st.deferred(lambda: st.just(saved())),
            (
                f"{collective} --json --size <>",
                "collective <> --topology dgx-1v --size 1MiB",
                "collective all_reduce --topology <> --size 1MiB",
                f"{collective} -b 8 -e <>",
                f"{collective} --size 1MiB --algorithm <>",
                f"{collective} --size 1MiB --nccl-version <>",
                "export . t.csv --ranks <>",
                f"{plot} --window <>",
                f"{plot} --title <>",
                f"{plot} --zoom <>",
                "plot <> . p.svg",
                "plot topology <> p.svg",
                "plot topology dgx-1v p.svg --nodes <>",
                "export . <>",
                "trace . --format <>",
                "replay . --topology <>",
                "compare . <>",
                "explain <>",
                "report <>",
                "describe mine.toml --rank <>",
                "describe --keys <>",
                "list <>",
                "schema <>",
                "check dgx-1v --nodes <>",
                "run <> --json",
                "run mine.toml --out <>/x",
                "memory <>",
                "plan <> --out out",
                "sweep <> --out out",
                "sensitivity mine.toml --nodes <>",
                "validate steps t.csv --by <>",
                "lessons <>/x/y",
            ),
            words=WORDS,
        ),
        "new words": Kind(
            "run.sh",
            st.just(b"torchrun train.py --num-layers 2"),
            (
                "new scenario made.toml --model <>",
                "new scenario <>",
                "new topology m.toml --topology dgx-1v --nics <>",
                "new plan made.toml --gpu <>",
                "new sweep made.toml --base <>",
                "new topology m.toml --oversubscription <>",
                "import {} -o <> --topology dgx-1v",
                "import <> -o made.toml",
                "import {} -o m.toml --topology <> --model gpt2",
                "import {} -o m.toml --topology dgx-1v --model <>",
                "export-config mine.toml --to <>",
                "export-config split.toml --to megatron -o <>",
                "explore <> config.json",
            ),
            words=WORDS,
        ),
    }
