"""How large the house is, and where it could be smaller: one table.

    python tests/house.py [--list]

Lines by package, files and functions over the limits of the house style, dictionaries of anything, circles of files,
and public definitions without a docstring. ``--list`` names each.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "clustersim"
FILE_LINES, PARAMETERS, CODE_LINES = 300, 6, 30
ANYTHING = re.compile(r"\b(?:dict|Mapping)\[str, (?:Any|object)\]|(?:-> |: |\[|, )Plain\b(?! *\()")
"""By whichever name: an answer in plain values (``texts.Plain``) is one, too. What a file says (``Table``) is open by
nature, and is not counted."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file of the package: its path below the package, its text and its tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """As it is imported."""
        parts = ("clustersim", *self.path.with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The folder it is in, or ``(top)``."""
        return self.path.parts[0] if len(self.path.parts) > 1 else "(top)"

    @property
    def lines(self) -> int:
        """All of them."""
        return len(self.text.splitlines())


def sources() -> list[Source]:
    """Every file of the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [Source(path.relative_to(PACKAGE), path.read_text(), ast.parse(path.read_text())) for path in paths]


def functions(source: Source) -> Iterator[Function]:
    """Of a file, methods and inner ones too."""
    return (node for node in ast.walk(source.tree) if isinstance(node, Function))


def code_lines(function: Function) -> int:
    """Lines with code on them, without the signature, the docstring, comments and blank lines."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    on = {line for node in body for line in _lines(node)}
    return len(on)


def _lines(node: ast.AST) -> Iterator[int]:
    for one in ast.walk(node):
        if hasattr(one, "lineno"):
            yield from {one.lineno, one.end_lineno}


def parameters(function: Function) -> int:
    """That a caller can give; ``self`` and ``cls`` are no parameters."""
    given = function.args
    names = [one.arg for one in chain(given.posonlyargs, given.args, given.kwonlyargs)]
    return len([name for name in names if name not in {"self", "cls"}])


def undocumented(source: Source) -> Iterator[str]:
    """Public functions and classes of a file, and public methods of public classes, without a docstring."""

    def look(body: list[ast.stmt], inside: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, (*Function.__args__, ast.ClassDef)) and not node.name.startswith("_"):
                if ast.get_docstring(node) is None:
                    yield f"{inside}{node.name}"
                if isinstance(node, ast.ClassDef):
                    yield from look(node.body, f"{inside}{node.name}.")

    return look(source.tree.body, f"{source.path}: ")


def imports(source: Source, known: set[str]) -> set[str]:
    """Files of the package that a file imports when it is itself imported."""
    found: set[str] = set()
    for node in source.tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= below or ({node.module} & known)
    return found - {source.name}


def circles(found: list[Source]) -> list[list[str]]:
    """Groups of files that import each other in a circle (Tarjan's strongly connected components of two and more)."""
    import networkx as nx

    known = {one.name for one in found}
    graph = nx.DiGraph([(one.name, other) for one in found for other in imports(one, known)])
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def measured(found: list[Source]) -> dict[str, list[str]]:
    """What is over a limit, by limit."""
    each = [(one, function) for one in found for function in functions(one)]
    return {
        f"files over {FILE_LINES} lines": [f"{one.path}: {one.lines}" for one in found if one.lines > FILE_LINES],
        f"functions with more than {PARAMETERS} parameters": [
            f"{one.path}: {function.name}: {parameters(function)}"
            for one, function in each
            if parameters(function) > PARAMETERS
        ],
        f"functions over {CODE_LINES} code lines": [
            f"{one.path}: {function.name}: {code_lines(function)}"
            for one, function in each
            if code_lines(function) > CODE_LINES
        ],
        "dictionaries of anything": [
            f"{one.path}: {len(ANYTHING.findall(one.text))}" for one in found for _ in ANYTHING.findall(one.text)
        ],
        "public definitions without a docstring": [name for one in found for name in undocumented(one)],
        "circles of files": [" - ".join(names) for names in circles(found)],
    }


def main() -> None:
    """Print the table."""
    found = sources()
    lines = Counter[str]()
    for one in found:
        lines[one.package] += one.lines
    files = Counter(one.package for one in found)
    for package in sorted(lines):
        print(f"{package:14} {files[package]:4} files {lines[package]:7,} lines")
    print(f"{'all':14} {len(found):4} files {sum(lines.values()):7,} lines")
    for what, which in measured(found).items():
        print(f"{len(which):5} {what}")
        for name in dict.fromkeys(which) if "--list" in sys.argv else ():
            print(f"        {name}")


if __name__ == "__main__":
    main()
