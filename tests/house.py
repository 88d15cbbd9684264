"""How large the house is, and how hard to enter: one table, beside what is aimed for.

    python tests/house.py [--list]

Rooms and how they reach each other, names, density, lines by room, and what is over a limit of the house style.
``--list`` names each. The limits are warnings: a file is never crammed to meet one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "clustersim"
FILE_LINES = 400
PARAMETERS = 7
CODE_LINES = 40
VAGUE = frozenset(
    [
        "found",
        "one",
        "said",
        "told",
        "known",
        "mine",
        "what",
        "whole",
        "kept",
        "made",
        "asked",
        "held",
        "each",
        "words",
        "where",
        "at",
        "of",
        "way",
        "other",
        "others",
        "some",
        "there",
        "here",
        "then",
        "that",
        "this",
        "these",
        "those",
        "it",
    ]
)
"""Names that do not say what they hold."""
REACH = {"check": 14_000, "collective": 19_000, "run": 35_000}
"""Commands, and how many lines of the package each may reach by its imports, those inside functions included."""
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
    def room(self) -> str:
        """The folder it is in, or ``(door)``."""
        return self.path.parts[0] if len(self.path.parts) > 1 else "(door)"

    @property
    def lines(self) -> int:
        """All of them."""
        return len(self.text.splitlines())


@lru_cache(maxsize=1)
def sources() -> list[Source]:
    """Every file of the package; read once, which takes four seconds."""
    texts = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return [Source(path, text, ast.parse(text)) for path, text in texts.items()]


def functions(source: Source) -> Iterator[Function]:
    """Of a file, methods and inner ones too."""
    return (node for node in ast.walk(source.tree) if isinstance(node, Function))


def code_lines(function: Function) -> int:
    """Lines with code on them, without the signature, the docstring, comments and blank lines."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    on = {line for node in body for line in _lines(node)}
    return len(on)


def _lines(node: ast.AST) -> Iterator[int]:
    for inner in ast.walk(node):
        if hasattr(inner, "lineno"):
            yield from {inner.lineno, inner.end_lineno}


def parameters(function: Function) -> int:
    """That a caller can give; ``self`` and ``cls`` are no parameters."""
    given = function.args
    names = [argument.arg for argument in chain(given.posonlyargs, given.args, given.kwonlyargs)]
    return len([name for name in names if name not in {"self", "cls"}])


def undocumented(source: Source) -> Iterator[str]:
    """Functions, methods and classes of a file without a docstring, inner ones too, whose own name is public."""
    for node in ast.walk(source.tree):
        public = isinstance(node, (*Function.__args__, ast.ClassDef)) and not node.name.startswith("_")
        if public and ast.get_docstring(node) is None:
            yield f"{source.path}: {node.name}"


def for_types(tree: ast.Module) -> set[int]:
    """Nodes that only a type checker reads."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    return {id(inner) for block in blocks for statement in block.body for inner in ast.walk(statement)}


@lru_cache(maxsize=1)
def lookups() -> dict[str, dict[str, str]]:
    """Packages whose names are looked up when first used (``core.lookup``): name -> the module that defines it."""
    out: dict[str, dict[str, str]] = {}
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "looked_up" and len(node.args) == 2:
                table: dict[str, str] = ast.literal_eval(node.args[1])
                homes = {name: f"{source.name}.{module}" for module, names in table.items() for name in names.split()}
                out[source.name] = homes
    return out


def looked_up_by(source: Source, skipped: set[int]) -> set[str]:
    """Modules whose names a file takes from a package that looks them up: as if it imported them."""
    tables = lookups()
    packages: dict[str, str] = {}
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in skipped:
            homes = tables.get(node.module, {})
            names |= {homes[alias.name] for alias in node.names if alias.name in homes}
            inner = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            packages |= {name: package for name, package in inner.items() if package in tables}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            names |= {home for home in [tables[packages[node.value.id]].get(node.attr)] if home}
    return names


def imports(source: Source, modules: set[str], inside: bool = False) -> set[str]:
    """Files of the package that a file imports when it is itself imported.

    inside : those that its functions import as well, modules named by a string, and those of names that a package
    looks up when they are used; none that is for types only.
    """
    skipped = for_types(source.tree) if inside else set()
    nodes: Iterable[ast.AST] = ast.walk(source.tree) if inside else source.tree.body
    names: set[str] = set()
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            names |= below or ({node.module} & modules)
        elif inside and isinstance(node, ast.Constant) and node.value in modules:
            names.add(str(node.value))
    if inside:
        names |= looked_up_by(source, skipped)
    return names - {source.name}


def circles(files: list[Source]) -> list[list[str]]:
    """Groups of files that import each other in a circle (Tarjan's strongly connected components of two and more)."""
    import networkx as nx

    modules = {source.name for source in files}
    graph = nx.DiGraph([(source.name, other) for source in files for other in imports(source, modules)])
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def reached(files: list[Source], start: str) -> set[str]:
    """Modules that can be reached from one by imports, wherever they stand; a package is imported before its parts."""
    by_name = {source.name: source for source in files}
    modules = set(by_name)
    seen: set[str] = set()
    left = [start]
    while left:
        name = left.pop()
        if name in seen or name not in modules or name == "clustersim":
            continue
        seen.add(name)
        left.append(name.rpartition(".")[0])
        left += imports(by_name[name], modules, inside=True)
    return seen


def reach(files: list[Source], command: str) -> int:
    """Lines of the package that a command can reach."""
    lines = {source.name: source.lines for source in files}
    return sum(lines[name] for name in reached(files, f"clustersim.app.cli.{command}"))


def rooms(files: list[Source]) -> tuple[int, int, int]:
    """Rooms, floors (the longest way down), and arrows between rooms."""
    import networkx as nx

    modules = {source.name for source in files}
    graph = nx.DiGraph()
    for source in files:
        if source.name == "clustersim":
            continue
        here = source.name.split(".")[1]
        graph.add_node(here)
        for other in imports(source, modules, inside=True) - {"clustersim"}:
            there = other.split(".")[1]
            if there != here:
                graph.add_edge(here, there)
    floors = nx.dag_longest_path_length(nx.condensation(graph)) + 1
    return graph.number_of_nodes(), floors, graph.number_of_edges()


def shared_classes(files: list[Source]) -> tuple[list[str], int]:
    """Classes whose name another class has, too (a leading underscore is no difference), and how many classes are."""
    homes: dict[str, list[str]] = {}
    for source in files:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(f"{source.path}: {node.name}")
    total = sum(map(len, homes.values()))
    return [place for places in homes.values() if len(places) > 1 for place in places], total


def bindings(source: Source) -> Iterator[str]:
    """Every name that a file binds: variables and parameters."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def density(files: list[Source]) -> float:
    """Characters a line that is not blank, without its indent."""
    lines = [line.strip() for source in files for line in source.text.splitlines() if line.strip()]
    return sum(map(len, lines)) / len(lines)


def over(files: list[Source]) -> dict[str, list[str]]:
    """What is over a limit, by limit."""
    each = [(source, function) for source in files for function in functions(source)]
    return {
        f"files over {FILE_LINES} lines": [
            f"{source.path}: {source.lines}" for source in files if source.lines > FILE_LINES
        ],
        f"functions with more than {PARAMETERS} parameters": [
            f"{source.path}: {function.name}: {parameters(function)}"
            for source, function in each
            if parameters(function) > PARAMETERS
        ],
        f"functions over {CODE_LINES} code lines": [
            f"{source.path}: {function.name}: {code_lines(function)}"
            for source, function in each
            if code_lines(function) > CODE_LINES
        ],
        "dictionaries of anything": [
            f"{source.path}: {len(ANYTHING.findall(source.text))}"
            for source in files
            for _ in ANYTHING.findall(source.text)
        ],
        "public definitions without a docstring": [name for source in files for name in undocumented(source)],
        "circles of files": [" - ".join(names) for names in circles(files)],
    }


def entry(files: list[Source]) -> list[tuple[str, str, str]]:
    """How hard the house is to enter: (measure, today, aimed for)."""
    n_rooms, floors, arrows = rooms(files)
    shared, n_classes = shared_classes(files)
    names = [name.strip("_") for source in files for name in bindings(source)]
    n_vague = sum(name in VAGUE for name in names)
    n_skips = sum(source.text.count("# fmt: skip") for source in files)
    rows = [
        ("rooms / floors / arrows between rooms", f"{n_rooms} / {floors} / {arrows}", "14 / 9 / 95"),
        ("class names defined more than once", f"{100 * len(shared) / n_classes:.1f} %", "10 %"),
        ("vague bindings", f"{100 * n_vague / len(names):.1f} %", "2 %"),
        ("characters a line that is not blank / fmt: skip", f"{density(files):.1f} / {n_skips}", "42 / 50"),
        ("lines of the package", f"{sum(source.lines for source in files):,}", "70,000"),
    ]
    rows += [(f"lines that `{name}` can reach", f"{reach(files, name):,}", f"{most:,}") for name, most in REACH.items()]
    return rows


def main() -> None:
    """Print the table."""
    files = sources()
    lines = Counter[str]()
    for source in files:
        lines[source.room] += source.lines
    counts = Counter(source.room for source in files)
    for room in sorted(lines):
        print(f"{room:14} {counts[room]:4} files {lines[room]:7,} lines")
    print(f"{'all':14} {len(files):4} files {sum(lines.values()):7,} lines")
    print(f"{'':50} {'today':>16} {'aimed for':>14}")
    for measure, today, aim in entry(files):
        print(f"{measure:50} {today:>16} {aim:>14}")
    for limit, places in over(files).items():
        print(f"{len(places):5} {limit}")
        if "--list" in sys.argv:
            for place in sorted(set(places)):
                print(f"      {place}")


if __name__ == "__main__":
    main()
