"""Every lesson runs top to bottom on the public face alone, with words beside its pictures.

They are kept as they ran, so that a forge shows them, and what they say is checked by a file of ``tests/lessons``, run
behind their last cell.
"""

from __future__ import annotations

import ast
import json
import re
from itertools import pairwise

import pytest
import readme
from conftest import ROOT

LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCREEN = 25
"""Lines of a cell that a projector shows at once."""
CPU_SECONDS = 60.0
"""Processor time of a whole lesson at most. A promise to classes with small machines; lessons use a third of it."""
MAY_IMPORT = {"clustersim", "numpy", "IPython", "gzip", "itertools", "json", "pathlib", "tempfile"}
MEASURE = re.compile(r"(?<![\w.])\d[\d.,]*\s?(ms|us|µs|s|%|[KMGT]i?B|Gb/s|GB/s|times)(?![\w/])")
"""A quantity with its unit, as in "12.5 ms": in prose it would be true only until the package changes its mind."""

CLAIMS = ROOT / "tests" / "lessons"

each = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def cells(path, kind):
    """Sources of a notebook's cells of a kind."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def words_shown(notebook):
    """Of each cell what it shows, a picture as its words."""
    shown = []
    for cell in notebook["cells"]:
        datas = [output.get("data", output) for output in cell.get("outputs", [])]
        texts = ["".join(data.get("text/html") or data.get("text/markdown") or data.get("text", "")) for data in datas]
        shown.append([re.sub(r'src="data:[^"]*"', "", text) for text in texts])
    return shown


def test_no_two_lessons_have_one_number():
    assert LESSONS
    numbers = [path.stem.split("_")[0] for path in LESSONS]
    assert len(set(numbers)) == len(numbers)
    assert all(re.fullmatch(r"\d\d", number) for number in numbers)


@each
def test_a_lesson_is_kept_as_it_ran_once_from_top_to_bottom(path):
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not [out for cell in notebook["cells"] for out in cell.get("outputs", []) if "data" not in out]


@each
def test_students_see_no_test_and_each_claim_has_one(path):
    for source in cells(path, "code"):
        assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    claims = ast.parse((CLAIMS / f"{path.stem}.py").read_text())
    assert sum(isinstance(node, ast.Assert) for node in ast.walk(claims)) > 10


@each
def test_no_cell_is_longer_than_a_screen(path):
    for source in cells(path, "code") + cells(path, "markdown"):
        assert max(map(len, source.splitlines())) <= 120
    for source in cells(path, "code"):
        assert len(source.splitlines()) <= SCREEN


@each
def test_it_begins_with_a_question_and_a_guess_and_ends_with_two_exercises_whose_answers_fold(path):
    prose = cells(path, "markdown")
    assert prose[0].startswith(f"# {int(path.stem[:2])}. ")
    assert "**The question:**" in prose[0]
    assert any("**Guess first.**" in text for text in prose)
    exercises = prose[-1][prose[-1].index("## Exercises") :]
    assert [f"**{i}.**" in exercises for i in (1, 2, 3)] == [True, True, False]
    assert exercises.count("<details><summary>Answer</summary>") == exercises.count("</details>") == 2


@each
def test_the_first_thing_it_shows_is_a_picture_and_no_prose_stands_before_it_but_the_question(path):
    shown = []
    for cell in json.loads(path.read_text())["cells"]:
        shown += [cell["cell_type"]] if cell["cell_type"] == "markdown" else cell["outputs"]
        if cell["cell_type"] == "code" and cell["outputs"]:
            break
    assert shown[:-1] == ["markdown"]
    assert "<img " in "".join(shown[-1]["data"]["text/html"])


@each
def test_only_the_public_face_is_used(path):
    for source in cells(path, "code"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= MAY_IMPORT
            elif isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[0] in MAY_IMPORT
                assert not [name.name for name in node.names if name.name.startswith("_")]
            elif isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_")
            assert not isinstance(node, ast.ClassDef), "code that a lesson needs belongs in the package"


@each
def test_a_measured_figure_in_prose_comes_from_a_cell(path):
    for text in cells(path, "markdown"):
        prose = re.sub(r"`[^`]*`", "", text)
        assert not MEASURE.search(prose), MEASURE.search(prose)


def test_the_glossary_sends_every_word_to_a_lesson_that_uses_it():
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| \[(\d+)\]\(([^)]+)\) \|$", (ROOT / "notebooks" / "README.md").read_text(), re.M
    )
    assert len(rows) > 30
    for words, number, target in rows:
        assert target.startswith(f"{int(number):02d}_")
        text = " ".join(
            cells(ROOT / "notebooks" / target, "markdown") + cells(ROOT / "notebooks" / target, "code")
        ).lower()
        text = re.sub(r"[\s*_-]+", " ", text)
        for word in words.split(", "):
            assert re.sub(r"[\s*_-]+", " ", word.lower()) in text, f"{word!r} is not in lesson {number}"


def test_the_readme_lists_every_lesson_by_its_title():
    text = (ROOT / "notebooks" / "README.md").read_text()
    for path in LESSONS:
        title = cells(path, "markdown")[0].splitlines()[0].removeprefix("# ")
        assert f"| [{title}]({path.name}) |" in text


def test_each_of_five_exam_questions_has_a_folded_answer_that_a_command_prints():
    text = (ROOT / "notebooks" / "README.md").read_text()
    exam = text[text.index("## Five exam questions") : text.index("## Glossary")]
    questions = re.split(r"^\*\*(\d)\.\*\* ", exam, flags=re.M)[1:]
    assert questions[::2] == ["1", "2", "3", "4", "5"]
    for question in questions[1::2]:
        asked, _, answer = question.partition("<details><summary>Answer</summary>")
        assert "?" in asked
        assert len(list(readme.parts(answer))) == 1  # tests/test_readme.py holds what it prints
        lesson = re.search(r"\(After (?:\d+ and )?(\d+)\.\)", asked)
        assert list((ROOT / "notebooks").glob(f"{int(lesson[1]):02d}_*.ipynb"))


@each
def test_links_lead_somewhere(path):
    for text in cells(path, "markdown") + cells(path, "code"):
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert target.startswith("https://") or (path.parent / target).is_file(), target


@each
def test_it_runs_from_top_to_bottom_with_words_beside_every_picture(path):
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install 'clustersim[notebooks]'")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install 'clustersim[notebooks]'")
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    kept = words_shown(notebook)
    n = len(notebook.cells)
    notebook.cells.append(nbformat.v4.new_code_cell("import time\nprint(time.process_time())"))
    notebook.cells.append(nbformat.v4.new_code_cell((CLAIMS / f"{path.stem}.py").read_text()))
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert float(notebook.cells[n].outputs[0].text) <= CPU_SECONDS
    assert words_shown(notebook)[:n] == kept, "run it again and keep what it shows: clustersim lessons FOLDER --run"
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert not [data for data in shown if "image/png" in data], "a picture without words"
    images = [tag for data in shown for tag in re.findall("<img [^>]*>", data.get("text/html", ""))]
    assert len(images) >= 3
    assert all(re.match(r'<img alt="[^"]{30,}" ', tag) for tag in images)


@each
def test_no_line_of_a_sentence_begins_as_an_item_of_a_list(path):
    """Where a line is broken before a minus or a number, Markdown makes a bullet of half a sentence."""
    for text in cells(path, "markdown"):
        lines = text.splitlines()
        for before, line in pairwise(lines):
            if (
                re.match(r"(?:[-+*]|\d+[.)]) ", line)
                and before.strip()
                and not re.match(r"\s|[-+*|#<]|\d+[.)]", before)
            ):
                assert before.rstrip().endswith((":", "**")), line
