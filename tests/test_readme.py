"""The README holds no number that a command does not print."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import readme

from clustersim.calibrate.score import read_table
from clustersim.training.parallel import FIELDS
from clustersim.training.schedules import SCHEDULES
from tests.evidence import bench

PARTS = [(page, arguments) for page in readme.PAGES for arguments, _ in readme.parts(page.read_text())]


@pytest.mark.parametrize(("page", "arguments"), PARTS, ids=lambda one: one if isinstance(one, str) else one.parent.name)
def test_a_generated_part_is_what_its_command_prints(page: Path, arguments: str) -> None:
    assert dict(readme.parts(page.read_text()))[arguments] == readme.printed(arguments), (
        f"run: python tests/readme.py --quick {page.relative_to(readme.ROOT)}"
    )


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.parent.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [to for to in targets if not to.startswith("https://") and not (page.parent / to).exists()] == []


def test_one_page_can_be_written_by_its_folder_and_a_page_that_is_none_is_named(capsys) -> None:
    assert readme.options(["--quick", "scenarios", "README.md"]).pages == [
        readme.ROOT / "scenarios" / "README.md",
        readme.README,
    ]
    assert readme.options([]).pages == []
    with pytest.raises(SystemExit):
        readme.options(["nonsense"])
    assert "no page 'nonsense'; pages are README.md, scenarios/README.md" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        readme.options(["--help"])


def test_the_readme_is_short() -> None:
    assert len(readme.README.read_text().splitlines()) <= 200


def test_the_table_of_costs_has_every_row_and_target_whatever_the_times() -> None:
    (found,) = readme.MEASURED.finditer(readme.EVIDENCE.read_text())
    assert found["arguments"].startswith("bench")
    lines = found["body"].splitlines()
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    rows: list[list[str]] = []
    for cells in table:
        if cells[1]:
            rows.append(cells)
        else:  # a row that goes on
            rows[-1] = [f"{one} {more}".strip() for one, more in zip(rows[-1], cells, strict=True)]
    targets = {cells[0]: float(cells[4]) for cells in rows}  # behind seconds, a unit, and units
    assert targets == pytest.approx({row.what: row.target for row in bench.ROWS})
    assert any(line.startswith("cost = ") for line in lines), "the fit"
    assert "One machine with" in lines[-1]


def test_every_shipped_scenario_that_a_page_names_exists() -> None:
    text = "".join(page.read_text() for page in readme.PAGES)
    named = {
        Path(word).stem for word in text.replace("`", " ").split() if word.startswith("scenarios/") and "*" not in word
    }
    shipped = {path.stem for path in (readme.ROOT / "scenarios").glob("*.toml")}
    assert {name for name in named if name and name != "scenarios"} <= shipped


def test_asking_for_a_part_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        told.append(command)
        return subprocess.CompletedProcess(command, 0, "| x |")

    monkeypatch.setattr(subprocess, "run", run)
    readme.printed("validate nccl x --plot picture.png --markdown")
    assert told[0][3:] == ["validate", "nccl", "x", "--markdown"]


def test_a_slow_part_is_about_the_rows_of_its_table() -> None:
    """All of them, unless some are left out to learn from the others."""
    for found in readme.SLOW.finditer(readme.EVIDENCE.read_text()):
        (name,) = [word for word in found["arguments"].split() if word.endswith(".csv.gz")]
        every = len(read_table(readme.ROOT / name, []))
        if " score " in found["arguments"]:  # by parts, which have no sum of all
            counts = re.findall(r"^\| [^|]+ \| (\d+) \| \d+ \| \d+ \|", found["body"], re.MULTILINE)
            assert sum(map(int, counts)) == every, "run: python tests/readme.py"
            continue
        rows = sum(map(int, re.findall(r"^\|  \| all \| (\d+) \|", found["body"], re.MULTILINE)[:1]))
        some = "--cross-validate" in found["arguments"]
        assert 100 < rows <= every if some else rows == every, "run: python tests/readme.py"


def test_every_schedule_and_every_field_of_parallel_is_listed() -> None:
    text = (readme.ROOT / "scenarios" / "README.md").read_text()
    assert [name for name in (*SCHEDULES, *FIELDS) if f"`{name}`" not in text] == []
