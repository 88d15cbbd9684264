"""Launch files of training frameworks that are nearly right, and what a browser may send to ``clustersim explore``."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hostile_documents import CAMPAIGN, SCENARIO, SPLIT
from hostile_files import DATA, SLOW, Kind
from hostile_values import NASTY, damaged, documents, json_file, tables, toml_file
from hypothesis import strategies as st

LAUNCH = DATA / "launch"
PRIMUS = """work_group: own
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: deepseek_v2_lite.yaml
    overrides:
      train_iters: ${ITERATIONS:50}
      micro_batch_size: 2
      global_batch_size: 128
      seq_length: 4096
      expert_model_parallel_size: 8
      enable_primus_turbo: true
      use_turbo_deepep: true
      moe_shared_expert_overlap: false
      moe_router_dtype: fp32
      recompute_granularity: full
      recompute_method: block
      recompute_num_layers: 4
"""
AUTOMODEL = """step_scheduler: {global_batch_size: 16, local_batch_size: 2}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
  torch_dtype: float32
distributed:
  strategy: fsdp2
  dp_size: 8
  tp_size: 2
  pp_size: 2
  pipeline: {pp_schedule: 1f1b, pp_microbatch_size: 1}
  mp_policy: {reduce_dtype: bfloat16}
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: transformer_engine.pytorch.optimizers.FusedAdam, exp_avg_dtype: torch.float32}
fp8: {enabled: false}
"""
PRIME = """max_steps = 5
[model]
name = "Qwen/Qwen3-8B"
dp_replicate = 2
[model.ac]
[model.lora]
rank = 4
[data]
batch_size = 32
seq_len = 4096
[optim]
max_norm = 1.0
[deployment]
type = "multi_node"
num_nodes = 4
nodes_per_fsdp_group = 2
"""
SAID = (
    "--max-steps",
    "--tensor-model-parallel-size 3",
    "$(rm -rf .)",
    "${X:-${X}}",
    "`id`",
    "$((1/0))",
    "$((9**9**9))",
    "$((" * 500,
    "<<EOF",
    "\\",
    "for i in 1 2; do",
    "source x.sh",
    "|",
    "&&",
    "'",
    '"',
    "-",
    "--",
    "--=",
    "=3",
    "@x",
    "null",
    "~",
    "*a",
    "&a",
    "!!python/object:os.system",
    "0o777",
    "1e5",
    "12:30:00",
    "2026-11-22",
    "[",
    "{",
)
"""Words that a shell or a YAML reader takes for more than a value."""


def commented(text: str) -> str:
    """A JSON file with comments of three kinds and last commas, as hjson has them."""
    lines = [f"{line} // {i}" if i % 2 else f"# {i}\n{line}" for i, line in enumerate(text.splitlines())]
    return re.sub(r"([}\]])", r", /* last */ \1", "\n".join(lines), count=1)


@st.composite
def reworded(draw: Any, text: str) -> bytes:
    """A text of words with some replaced, left out, or there once more somewhere else."""
    parts = re.split(r"(\s+|=)", text)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(parts) - 1))
        act = draw(st.sampled_from(["set", "set", "set", "drop", "move"]))
        value = draw(st.one_of(NASTY.map(str), st.sampled_from(SAID))) if act == "set" else ""
        if act == "move":
            value = f" {parts[at]} "
            at = draw(st.integers(0, len(parts) - 1))
        parts[at] = value
    return "".join(parts).encode("utf-8", "surrogatepass")


def yaml_file(table: Any) -> bytes:
    """A YAML file."""
    import yaml

    return bytes(yaml.safe_dump(table, allow_unicode=True).encode("utf-8", "surrogatepass"))


def headed(table: dict[str, Any]) -> bytes:
    """A TOML file whose tables have headings, as people write them."""
    made = [f"[{key}]\n{toml_file(value).decode()}" for key, value in table.items() if isinstance(value, dict)]
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    return (toml_file(plain).decode("utf-8", "surrogatepass") + "\n".join(made)).encode("utf-8", "surrogatepass")


def launch_files() -> dict[str, Kind]:
    """Kinds of launch files, by whose they are."""
    import yaml

    text = {path.name: path.read_text("utf-8") for path in sorted(LAUNCH.iterdir())}
    megatron, mixtral, titan, nemo, accelerate, stages = (
        text[name]
        for name in (
            "megatron_llama3_70b.sh",
            "megatron_mixtral_8x7b.yaml",
            "torchtitan_llama3_70b.toml",
            "nemo_llama3_8b.yaml",
            "accelerate_fsdp.yaml",
            "deepspeed_zero3.json",
        )
    )
    read = "import {} -o made.toml --topology dgx-h100 --nodes 4"
    both = f"{read} deepspeed_llama2_7b.sh --json", "import {} -o made.toml --topology hgx-a100 --model gpt2 --nodes 1"
    trained = f"{read} accelerate_llama3_8b.sh --json", f"{read} --model gpt2"

    def beside(*names: str) -> Callable[[], dict[str, bytes]]:
        return lambda: {name: text[name].encode() for name in names}

    def mapped(source: str, write: Callable[[Any], bytes], table: Any) -> Any:
        return damaged(st.one_of(reworded(source), documents(table).map(write)))

    return {
        "megatron": Kind("run.sh", damaged(reworded(megatron)), (f"{read} --json", f"{read} --from megatron", read)),
        "megatron yaml": Kind("m.yaml", mapped(mixtral, yaml_file, yaml.safe_load(mixtral)), (f"{read} --json", read)),
        "torchtitan": Kind("t.toml", mapped(titan, headed, tomllib.loads(titan)), (f"{read} --json", read)),
        "deepspeed": Kind(
            "deepspeed_zero3.json",
            mapped(stages, json_file, json.loads(stages)),
            both,
            beside("deepspeed_llama2_7b.sh"),
        ),
        "commented json": Kind(
            "deepspeed_zero3.json",
            damaged(reworded(commented(stages))),
            both,
            beside("deepspeed_llama2_7b.sh"),
        ),
        "accelerate": Kind(
            "accelerate_fsdp.yaml",
            mapped(accelerate, yaml_file, yaml.safe_load(accelerate)),
            trained,
            beside("accelerate_llama3_8b.sh"),
        ),
        "nemo": Kind("n.yaml", mapped(nemo, yaml_file, yaml.safe_load(nemo)), (f"{read} --json", read)),
        "automodel": Kind("a.yaml", mapped(AUTOMODEL, yaml_file, yaml.safe_load(AUTOMODEL)), (f"{read} --json", read)),
        "prime-rl": Kind("s.toml", mapped(PRIME, headed, tomllib.loads(PRIME)), (f"{read} --json", read)),
        "primus": Kind("p.yaml", mapped(PRIMUS, yaml_file, yaml.safe_load(PRIMUS)), (f"{read} --json", read)),
    }


# ---- what a browser sends --------------------------------------------------------------------------------------------

HOST = "127.0.0.1:8000"
TOKEN = "correct-horse"


@cache
def _schema() -> Any:
    from clustersim.app.cli.keys import schema

    return schema("scenario")


class Here:
    """A worker in this process, so that nothing that goes wrong in it is lost."""

    def __init__(self, path: str) -> None:
        from clustersim.app.explore.runs import RunPlayer

        self.player = RunPlayer(path)

    async def __call__(self, ask: Any) -> Any:
        return self.player(ask)


def ask(page: Any, path: str, query: str = "", body: bytes | None = None) -> tuple[int, str]:
    """Status and text of what an application answers, without a server between."""
    sent = [{"type": "http.request", "body": body or b""}]
    answer = []
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET" if body is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", HOST.encode())],
        "scheme": "http",
        "root_path": "",
        "client": None,
        "server": None,
    }

    async def receive() -> Any:
        return sent.pop() if sent else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answer.append(message)

    asyncio.run(page(scope, receive, send))
    text = b"".join(one.get("body", b"") for one in answer).decode()
    return int(answer[0]["status"]), text


def asked(path: str, sent: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr as a command would have them, of a browser's question to ``explore PATH``.

    ``sent`` : a file to post to the page's ``play``, or ``?...`` for its ``scenario.toml``. A page that says what is
    wrong ends as a command does that was refused.
    """
    from clustersim.app.explore.server import application
    from clustersim.core.errors import ClusterSimError

    worker: Any = Here
    try:
        page = application(path, _schema(), TOKEN, HOST, worker(path))
    except ClusterSimError as error:
        return 2, "", f"error: {error}\n"
    assert ask(page, f"/{TOKEN}/")[0] == 200
    if sent.startswith("?"):
        status, text = ask(page, f"/{TOKEN}/scenario.toml", urlencode({"set": sent[1:]}, errors="surrogatepass"))
        if status == 200:
            tomllib.loads(text)
            return 0, "", ""
        return 2 if status == 400 else 1, "", text
    status, text = ask(page, f"/{TOKEN}/play", body=Path(sent).read_bytes())
    wrong = json.loads(text).get("error", "")
    return ((2 if wrong else 0) if status in (200, 400) else 1), text, wrong


@st.composite
def forms(draw: Any) -> dict[str, str]:
    """What a form may send: some fields, with one of their choices, another's, or what nobody means."""
    from clustersim import scenario
    from clustersim.app.explore.fields import form_of

    known = form_of(scenario.from_table(SPLIT, "split.toml"), _schema()).known
    made = {}
    for key in draw(st.lists(st.sampled_from([*known, "no.such"]), max_size=3)):
        one = known.get(key)
        usual = ["1", "2", "4", "0.5", "true", *(one.choices if one else ()), one.default if one else ""]
        made[key] = draw(st.one_of(*[st.sampled_from(usual)] * 3, NASTY.map(str)))
    return made


def _bodies() -> Any:
    whole = st.fixed_dictionaries({"now": forms(), "before": st.one_of(st.none(), forms())})
    return damaged(st.one_of(whole, whole, whole.flatmap(documents)).map(json_file), 40)


def page_kinds() -> dict[str, Kind]:
    """What is sent to the page of a scenario."""
    whole = SCENARIO | {"campaign": CAMPAIGN}
    words = st.tuples(
        st.sampled_from([f"{a}.{b}" for a, t in SPLIT.items() for b in t] + ["a.b", "cluster.topology", "run", ""]),
        st.one_of(NASTY.map(str), st.sampled_from(["1", "2", "zero", "{}", "fp16", "dgx-2", "hgx-*", "''"])),
    ).map("=".join)
    return {
        "page": Kind("body.json", st.deferred(_bodies), ("explore mine.toml {}", "explore split.toml {}"), share=SLOW),
        "page saved": Kind(
            "mine.toml",
            damaged(st.one_of(st.just(whole), documents(whole)).map(toml_file), 30),
            ("explore {} ?<>",),
            words=words,
        ),
    }


# ---- machines that are mixed, change while a run goes on, and are drawn ----------------------------------------------

MIX: dict[str, Any] = {
    "name": "mix",
    "nodes": [{"type": "hgx-a100", "count": 1}, {"type": "hgx-h100", "count": 1}],
    "fabric": {"kind": "rail_optimised", "source": "made"},
}
TIMES = ("0 s", "1e-30 s", "1 ns", "1 us", "1 ms", "20 ms", "1 s", "2 s", "1e9 s")
"""Begins, ends and returns of a change, ascending."""


def machine_kinds() -> dict[str, Kind]:
    """Kinds of machines."""
    from clustersim.scenario.file.schema import Change

    names = st.sampled_from(
        ["node0/gpu0", "node*/gpu*", "node0/gpu0 -> node0/gpu1", "node0/* <-> *", "*", "node9/nic0"]
    )
    factor = st.sampled_from([0.5, 1e-3, 1e-6, 1.0])
    times = st.sampled_from(TIMES)
    usual = {"match": names, "factor": factor, "from": times, "until": times, "every": times}
    rising = st.lists(st.integers(0, len(TIMES) - 1), min_size=2, max_size=3, unique=True).map(sorted)
    timed = st.tuples(names, factor, rising).map(
        lambda one: {
            "match": one[0],
            "factor": one[1],
            **{key: TIMES[i] for key, i in zip(("from", "until", "every"), one[2], strict=False)},
        }
    )
    always = st.fixed_dictionaries({"match": names, "factor": factor})
    gone = st.fixed_dictionaries({"match": names, "remove": st.just(True)})
    change = st.one_of(timed, timed, timed, always, gone, tables(Change, usual, most=4))
    some = st.lists(change, min_size=1, max_size=3)
    varied = some.map(lambda made: {**SCENARIO, "cluster": {**SCENARIO["cluster"], "changes": made}})
    mixed = {**SCENARIO, "cluster": {"topology": "mix.toml"}, "strategy": {"kind": "fsdp", "micro_batch_size": 1}}
    return {
        "changes": Kind(
            "mine.toml",
            damaged(varied.map(toml_file), 40),
            ("run {} --json", "run {} --json", "explain {} --json", "run {} --json --set run.fidelity=chunk"),
        ),
        "mixed": Kind(
            "mix.toml",
            damaged(documents(MIX).map(toml_file), 20),
            (
                "run mixed.toml --json",
                "run split.toml --json --set cluster.topology=mix.toml",
                "check {}",
                "memory mixed.toml",
                "describe mixed.toml",
            ),
            lambda: {"mixed.toml": toml_file(mixed)},
            share=SLOW,
        ),
    }
