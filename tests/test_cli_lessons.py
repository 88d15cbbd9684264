"""``clustersim lessons`` copies what the package carries, never over somebody's work, and a wheel carries all of it."""

from __future__ import annotations

import json
import sys
import tomllib

import pytest
from conftest import ROOT

from clustersim.app import lessons
from clustersim.core.errors import ClusterSimError

SHIPPED = sorted((ROOT / "notebooks").glob("*.ipynb"))


def notebook(folder, name="01_small.ipynb", code="1 + 1"):
    """A folder of notebooks with a single small one in it."""
    folder.mkdir()
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# 1. Small?\n", "\n", "text"]},
        {"cell_type": "code", "id": "b", "metadata": {}, "source": [code], "outputs": [], "execution_count": None},
    ]
    text = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / name).write_text(json.dumps(text))
    return folder


def test_every_lesson_is_copied_as_it_is_and_named(clustersim, tmp_path):
    done = clustersim("lessons", tmp_path / "mine")
    assert (done.returncode, done.stderr) == (0, "")
    copies = sorted((tmp_path / "mine").iterdir())
    assert [path.name for path in copies] == [path.name for path in SHIPPED]
    assert [path.read_bytes() for path in copies] == [path.read_bytes() for path in SHIPPED]
    assert "01_where_the_time_goes.ipynb  Where does the time go?" in done.stdout
    assert f"jupyter lab {tmp_path / 'mine' / SHIPPED[0].name}" in done.stdout
    assert "pip install 'clustersim[notebooks]'" in done.stdout
    assert clustersim("lessons", tmp_path / "mine").returncode == 0  # once more changes nothing


def test_a_changed_copy_is_kept_unless_forced(clustersim, tmp_path):
    clustersim("lessons", tmp_path)
    mine = tmp_path / SHIPPED[1].name
    mine.write_text("my work")
    (tmp_path / SHIPPED[0].name).unlink()
    done = clustersim("lessons", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"{mine} is there and is not the lesson as it comes" in done.stderr
    assert mine.read_text() == "my work"
    assert not (tmp_path / SHIPPED[0].name).exists()
    assert clustersim("lessons", tmp_path, "--force").returncode == 0
    assert mine.read_bytes() == SHIPPED[1].read_bytes()


def test_a_place_that_cannot_be_written_is_one_clear_error(clustersim, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        done = clustersim("lessons", folder)
        assert done.returncode == 2
        assert str(folder) in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "failed"), [("1 + 1", ""), ("assert 1 > 2, 'too small'", "AssertionError: too small")]
)
def test_running_keeps_what_cells_show_and_says_what_failed(monkeypatch, tmp_path, code, failed):
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install 'clustersim[notebooks]'")
    pytest.importorskip("nbclient", reason="needs nbclient: pip install 'clustersim[notebooks]'")
    monkeypatch.setattr(lessons, "data_path", lambda kind: notebook(tmp_path / kind, code=code))
    (copy,) = lessons.copy(tmp_path / "mine")
    assert copy.title == "Small?"
    seen = []
    assert lessons.run(copy, lambda done, total: seen.append((done, total))) == failed
    outputs = json.loads(copy.path.read_text())["cells"][1]["outputs"]
    assert outputs[0]["output_type"] == ("error" if failed else "execute_result")
    if not failed:
        assert seen[-1] == (2, 2)
        assert outputs[0]["data"]["text/plain"] in ("2", ["2"])


def test_without_a_kernel_running_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "nbclient", None)
    (first, *_) = lessons.copy(tmp_path)
    with pytest.raises(ClusterSimError, match=r"pip install 'clustersim\[notebooks\]'"):
        lessons.run(first)


def test_a_wheel_carries_every_lesson():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    carried = table["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for path in SHIPPED:
        assert carried[f"notebooks/{path.name}"] == f"clustersim/notebooks/{path.name}"
    assert "notebooks" in table["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
