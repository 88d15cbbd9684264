"""Figures in the README and in the pages of the folders are what a command prints, and nothing else.

A part between ``<!-- begin: ARGUMENTS -->`` and ``<!-- end -->`` is the output of ``clustersim ARGUMENTS``. ``python
tests/readme.py`` writes all of them anew, draws the pictures that ``--plot`` names, and dates the pages;
``tests/test_readme.py`` says when a part is stale.

A part that begins with ``slow:`` instead is written by the same command, but takes too long (ten seconds and more) for
the test to print it again; ``--quick`` leaves those as they are.

A part that begins with ``measured:`` instead holds times of one machine on one day, which no two runs agree on:
``python tests/readme.py --measured`` writes those alone, and the test looks at their rows only.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = (
    README,
    *(ROOT / name / "README.md" for name in ("scenarios", "topologies", "tests", "notebooks", "clustersim")),
)
EVIDENCE = ROOT / "tests" / "README.md"
DATE = re.compile(r"<!-- date -->([^<]*)<!-- -->")
PART = re.compile(r"(<!-- begin: (?P<arguments>.*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
SLOW = re.compile(r"(<!-- slow: (?P<arguments>.*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
MEASURED = re.compile(r"(<!-- measured: (?P<arguments>.*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def parts(text: str) -> Iterator[tuple[str, str]]:
    """(arguments, what stands there) of every generated part of a page."""
    for found in PART.finditer(text):
        yield found["arguments"], found["body"]


@cache
def printed(arguments: str, *, draw: bool = False) -> str:
    """What ``clustersim ARGUMENTS`` prints now; text that is no Markdown table is put into a code block.

    ``draw``: pictures too. Without it ``--plot FILE`` is left out, so that asking changes nothing; a file that ``-o``
    names is written elsewhere for the same reason.
    """
    words = shlex.split(arguments)
    if "--plot" in words and not draw:
        at = words.index("--plot")
        words = words[:at] + words[at + 2 :]
    env = {**os.environ, "COLUMNS": "150", "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [str(Path(folder) / word) if before == "-o" else word for before, word in pairwise(["", *words])]
        command = [sys.executable, "-m", "clustersim", *words]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        text = done.stdout.replace(f"{folder}{os.sep}", "")
    return text if "--markdown" in words else f"```\n$ clustersim {arguments}\n{text}```\n"


def measured(arguments: str) -> str:
    """What ``clustersim ARGUMENTS`` measures now, and where and when that is."""
    return f"{printed(arguments)}\nOne machine with {os.cpu_count()} cores, {date.today().isoformat()}.\n"


def print_ahead(kinds: Iterable[re.Pattern[str]], pages: Iterable[Path]) -> None:
    """Print all parts of these kinds, a few at a time: :func:`printed` remembers them."""
    found = [part["arguments"] for page in pages for kind in kinds for part in kind.finditer(page.read_text())]
    with ThreadPoolExecutor(os.cpu_count()) as several:
        for _ in several.map(lambda arguments: printed(arguments, draw=True), dict.fromkeys(found)):
            pass


def page_of(word: str) -> Path:
    """A page by its path or its folder: ``README.md``, ``scenarios``, ``tests/README.md``."""
    path = ROOT / word
    page = path / "README.md" if path.is_dir() else path
    if page not in PAGES:
        names = ", ".join(str(known.relative_to(ROOT)) for known in PAGES)
        raise argparse.ArgumentTypeError(f"no page {word!r}; pages are {names}")
    return page


def options(words: list[str] | None = None) -> argparse.Namespace:
    """What is asked for: ``pages``, ``quick``, ``measured``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=page_of, metavar="PAGE", help="a page or its folder  [all]")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="leave the parts that take long as they are")
    which.add_argument("--measured", action="store_true", help="write the times of this machine, and nothing else")
    return parser.parse_args(words)


def main() -> None:
    """Rewrite every generated part of every page or of those asked for, or the measured ones."""
    asked = options()
    pages = asked.pages or PAGES
    kinds = (PART,) if asked.quick else (SLOW, PART)
    if not asked.measured:
        print_ahead(kinds, pages)
    for page in pages:
        text = page.read_text()
        if asked.measured:
            text = MEASURED.sub(lambda found: found[1] + measured(found["arguments"]) + found[4], text)
        else:
            for kind in kinds:
                text = kind.sub(lambda found: found[1] + printed(found["arguments"], draw=True) + found[4], text)
            text = DATE.sub(f"<!-- date -->{date.today().isoformat()}<!-- -->", text)
        page.write_text(text)


if __name__ == "__main__":
    main()
