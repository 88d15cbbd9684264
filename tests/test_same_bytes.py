"""Same in, same out: every command writes and prints the same bytes for the same input, whatever the hash seed, the
folder and the moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_documents import CAMPAIGN, CONFIG, MOE_CONFIG, PLAN, SCENARIO, SPLIT, SWEEP
from hostile_values import json_file, toml_file

pytest.importorskip("yaml", reason="needs pyyaml (the exchange extra)")

TESTS = Path(__file__).parent
VARIED = {**SCENARIO, "run": {"steps": 2, "variation": {}}}
FILES = {
    "mine.toml": toml_file(SCENARIO | {"campaign": CAMPAIGN}),
    "varied.toml": toml_file(VARIED),
    "plan.toml": toml_file(PLAN),
    "sweep.toml": toml_file(SWEEP),
    "split.toml": toml_file(SPLIT),
    "moe.json": json_file(MOE_CONFIG),
    "config.json": json_file(CONFIG),
    "run.sh": (TESTS / "data" / "launch" / "megatron_llama3_70b.sh").read_bytes(),
}
COMMANDS = (
    "run mine.toml --out run --report page.html --json",
    "run split.toml --out split --report split.html",
    "report run -o run.html",
    "explain run --json",
    "explain mine.toml --json",
    "explain split.toml",
    "export run spans.csv",
    "export run t.json.gz",
    "export run t.pftrace",
    "export run t.json",
    "plot gantt run gantt.svg",
    "plot links run links.png --dpi 40",
    "plot breakdown run breakdown.pdf",
    "plot pipeline split pipeline.svg",
    "plot topology dgx-1v machine.svg",
    "plan plan.toml --out plan --jobs 1 --json",
    "report plan -o plan.html",
    "export-config plan --to deepspeed -o option.json",
    "campaign mine.toml --replicas 3 --jobs 1 --out campaign --json",
    "report campaign -o campaign.html",
    "variation varied.toml --machines 3 --steps 4 --out varied.svg --json",
    "sweep sweep.toml --out sweep --jobs 1",
    "report sweep -o sweep.html",
    "export sweep sweep.csv",
    "import run.sh -o made.toml --topology dgx-h100 --nodes 4 --json",
    "export-config split.toml --to megatron -o launch.sh",
    "sensitivity mine.toml --json",
    "collective all_reduce --topology hgx-a100 --nodes 2 --size 1MiB --json",
    "memory split.toml",
    "describe split.toml",
    "new scenario new.toml --model gpt2",
)
PLAYED = """
import contextlib, io, sys
from pathlib import Path
from clustersim.app.cli import main
from clustersim.app.explore.runs import PlayRequest, RunPlayer

for number, words in enumerate(sys.argv[1:]):
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        main(words.split())
    Path(f"stdout {number}").write_text(told.getvalue())
Path("explored.html").write_text(RunPlayer("mine.toml")(PlayRequest(("run.steps=2",), ())).html)
"""


def played(folder: Path, hash_seed: str) -> dict[str, bytes]:
    """Every file that is in a folder after all commands."""
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "NO_COLOR": "1", "COLUMNS": "160"}
    words = [sys.executable, "-c", PLAYED, *COMMANDS]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "rror" in line]
    assert (done.returncode, errors) == (0, []), done.stderr[-3000:]
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_command_gives_the_same_bytes_for_any_hash_seed_and_folder(tmp_path):
    one = played(tmp_path / "one", "1")
    other = played(tmp_path / "another", "2")
    assert sorted(one) == sorted(other)
    assert len(one) > len(FILES) + len(COMMANDS) + 20
    assert [name for name in one if one[name] != other[name]] == []
