"""A script's words with their variables put in; what only running tells stays ``${NAME}``. Nothing is run."""

from __future__ import annotations

import ast
import re

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import short
from clustersim.files.launch.arithmetic import NO_NUMBER, number_of
from clustersim.files.launch.shell_output import printed
from clustersim.files.launch.shell_values import (
    UNKNOWN,
    Expansion,
    Variables,
    counted_up,
    echoed,
    function_key,
    text_of,
    trimmed,
)
from clustersim.files.launch.shell_words import DEPTH, skipped, tokens

MOST = 2**16
"""Characters that a value may grow to: variables of variables would make gigabytes."""

LONGEST_SUM = 1000
_CHOICE = re.compile(r"\A([^?]+)\?([^:?]+):([^:?]+)\Z")
"""One of two sums by a third: ``a>b?a:b``."""
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(
    r"(?P<count>#)?(?P<name>\w+|[@*#?])(?:\[(?P<at>[^\]]*)\])?(?P<op>:?[-=+?]|##?|%%?|//?|\^\^?|,,?|:|$)(?P<rest>.*)",
    re.DOTALL,
)


class _Fields:
    """Words under construction."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.now: str | None = None

    def put(self, text: str) -> None:
        """Add to the word under construction."""
        self.now = (self.now or "") + text
        grown(self.now)

    def end(self) -> None:
        """End the word, if there is one."""
        if self.now is not None:
            self.done.append(self.now)
        self.now = None

    def split(self, text: str) -> None:
        """Add a text without quotes: white space in it ends words."""
        pieces = text.split()
        if text[:1].isspace():
            self.end()
        for i, piece in enumerate(pieces):
            if i:
                self.end()
            self.put(piece)
        if pieces and text[-1:].isspace():
            self.end()

    def many(self, values: list[str]) -> None:
        """Add values that are a word each, the first to the word under construction."""
        for i, value in enumerate(values):
            if i:
                self.end()
            self.put(value)


def grown(text: str) -> str:
    """The text. Raises :class:`ScenarioError` for one that is too long."""
    if len(text) > MOST:
        raise ScenarioError(
            f"a script's {short(text[:60])!r} grows to {len(text):,} characters; at most {MOST:,} are read"
        )
    return text


def fields(word: str, variables: Variables, *, split: bool = True) -> list[str]:
    """What a word comes to: none, one or several words."""
    made = _Fields()
    _fill(word, variables, made, split=split, depth=0)
    made.end()
    return made.done


def value(word: str, variables: Variables) -> str:
    """What a word comes to as the value of a variable: it is not split."""
    return " ".join(fields(word, variables, split=False))


def body(text: str, variables: Variables) -> str:
    """The lines behind ``<<`` with their variables."""
    made = _Fields()
    _quoted(text, variables, made, depth=0, escapes="$`\\\n")
    return made.now or ""


def items(inside: str, variables: Variables) -> list[str]:
    """The words of a list, which stands between brackets."""
    found: list[str] = []
    for token in tokens(inside, "a list"):
        if token.kind == "word":
            found += fields(re.sub(r"^\[[^\]]*\]=", "", token.text), variables)
    return found


def by_key(inside: str, variables: Variables) -> dict[str, str]:
    """Of a list between brackets, what has a word for its place: ``[7b]=32``."""
    pairs = [re.fullmatch(r"\[([^\]]*)\]=(.*)", token.text, re.DOTALL) for token in tokens(inside, "a list")]
    keyed = {value(pair[1], variables): value(pair[2], variables) for pair in pairs if pair}
    return {key: held for key, held in keyed.items() if not key.isdecimal()}


def _fill(word: str, variables: Variables, made: _Fields, *, split: bool, depth: int) -> None:
    at = 0
    while at < len(word):
        char = word[at]
        end = skipped(word, at)
        end = len(word) if end < 0 else end
        if char == "'":
            made.put(word[at + 1 : end - 1])
        elif char == '"':
            made.put("")
            inside = word[at + 1 : end - 1]
            if re.fullmatch(r"\$(\{\w+\[[@]\]\}|@|\{@\})", inside) and made.now == "":
                made.now = None  # of an empty list there is no word at all
            _quoted(inside, variables, made, depth=depth)
        elif char == "\\":
            made.put(word[at + 1 : at + 2])
        elif word.startswith("$'", at):
            end = skipped(word, at + 1)
            made.put(word[at + 2 : end - 1])
        elif char in "$`":
            found, end = _substituted(word, at, variables, depth)
            joined = text_of(found) if found is not None else None
            if joined is None:
                made.put(char)
            elif isinstance(found, list):
                for i, one in enumerate(found):
                    if i:
                        made.end()
                    made.split(one)
            elif split:
                made.split(joined)
            else:
                made.put(joined)
        elif word.startswith(("<(", ">("), at):
            made.put("${command}")
        else:
            end = at + 1
            made.put(char)
        at = end


def _quoted(text: str, variables: Variables, made: _Fields, *, depth: int, escapes: str = '$`"\\\n') -> None:
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\" and text[at + 1 : at + 2] and text[at + 1] in escapes:
            made.put("" if text[at + 1] == "\n" else text[at + 1])
            at += 2
        elif char in "$`":
            found, at = _substituted(text, at, variables, depth)
            if found is None:
                made.put(char)
            elif isinstance(found, list):
                made.many(found)
            else:
                made.put(found)
        else:
            made.put(char)
            at += 1


def _substituted(text: str, at: int, variables: Variables, depth: int) -> tuple[str | list[str] | None, int]:
    """What a ``$...`` or a backquote comes to, and where it ends; None for a dollar that is only that."""
    if depth > DEPTH:
        raise ScenarioError(f"a script's {short(text)!r} holds substitutions more than {DEPTH} deep")
    end = skipped(text, at)
    if text.startswith("$((", at) and text[:end].endswith("))"):
        return total_of(text[at + 3 : end - 2], variables, depth + 1), end
    if text.startswith("$(", at) and end > 0:
        return _command(text[at + 2 : end - 1], variables, depth + 1), end
    if text[at] == "`" and end > 0:
        return _command(text[at + 1 : end - 1], variables, depth + 1), end
    if text.startswith("${", at) and end > 0:
        return _parameter(text[at + 2 : end - 1], variables, depth + 1), end
    name = _NAME.match(text, at + 1) if text[at] == "$" else None
    if name is None:
        return None, at + 1
    held = variables.get(name[0])
    if isinstance(held, list) and name[0] not in "@*":
        held = held[0] if held else ""
    return (f"${{{name[0]}}}" if held is None else held), name.end()


def _parameter(inside: str, variables: Variables, depth: int) -> str | list[str]:
    """``${inside}``: a variable, with what is to be done to it."""
    unknown = f"${{{inside}}}" if re.fullmatch(r"\w+", inside) else "${" + re.sub(r"[^\w@*].*", "", inside) + "}"
    parts = _PARAMETER.fullmatch(inside)
    if parts is None:
        return unknown
    held = variables.get(parts["name"])
    index = parts["at"]
    keyed = variables.get(f"{parts['name']}[{value(index, variables)}]") if index else None
    if keyed is not None:
        held = keyed
    elif isinstance(held, list) and index not in {"@", "*"} and parts["name"] not in "@*":
        place = sum_of(index, variables, depth) if index else 0
        held = (
            held[place] if place is not None and -len(held) <= place < len(held) else "" if place is not None else None
        )
    elif isinstance(held, str) and index in {"@", "*"}:
        held = [held] if held else []
    op = parts["op"]
    rest = parts["rest"]
    if parts["count"]:
        return unknown if held is None else str(len(held))
    if op and op[-1] in "-=+?" and op[0] in ":-=+?":
        return _default(parts["name"], held, op, rest, variables, depth, unknown)
    if held is None:
        return unknown
    if not op and not rest:
        return text_of(held) if index == "*" else held
    return _edited(text_of(held), op, rest, variables, unknown)


def _default(
    name: str, held: str | list[str] | None, op: str, rest: str, variables: Variables, depth: int, unknown: str
) -> str | list[str]:
    there = held is not None and (bool(held) or not op.startswith(":"))
    if op[-1] == "?":
        return held if held is not None else unknown
    if op[-1] == "+":
        return _nested(rest, variables, depth) if there else ""
    if there and held is not None:
        return held
    made = _nested(rest, variables, depth)
    if op[-1] == "=":
        variables[name] = made
    return made


def _nested(word: str, variables: Variables, depth: int) -> str:
    made = _Fields()
    _fill(word, variables, made, split=False, depth=depth)
    made.end()
    return " ".join(made.done)


def _edited(held: str, op: str, rest: str, variables: Variables, unknown: str) -> str:
    if UNKNOWN.search(held):
        return unknown
    if op in {"#", "##", "%", "%%"}:
        return trimmed(held, op, value(rest, variables))
    if op in {"/", "//"}:
        old, _, new = rest.partition("/")
        old = value(old, variables)
        if not old or re.search(r"[*?\[]", old):
            return unknown if old else held
        return held.replace(old, value(new, variables), 1 if op == "/" else -1)
    if op in {"^^", ",,"}:
        return held.upper() if op == "^^" else held.lower()
    if op == ":":
        start, _, length = rest.partition(":")
        first = sum_of(start, variables, 0)
        count = sum_of(length, variables, 0) if length else len(held)
        if first is not None and count is not None and first >= 0 and count >= 0:
            return held[first : first + count]
    return unknown


_SOUGHT = re.compile(r"(which|command -v|type -p) (?P<name>[\w.-]+)")
"""A program that is looked for by its name."""


def _command(inside: str, variables: Variables, depth: int) -> str:
    """What a command says that only repeats, adds up or finds: ``echo``, ``expr``, ``cat <<``, ``which``."""
    if depth > DEPTH:
        raise ScenarioError(f"a script's {short(inside)!r} holds substitutions more than {DEPTH} deep")
    parts = tokens(inside.strip(), "a command")
    is_own = bool(parts) and bool(variables.get(function_key(parts[0].text)))
    if is_own or any((one.kind == "operator" and one.text != ";") or one.text in {"if", "<<<"} for one in parts):
        return printed(parts, variables, EXPANSION)
    parts = [token for token in parts if token.text != ";"]
    if not parts:
        return "${command}"
    if parts[0].text == "cat" and len(parts) == 2 and parts[1].body:
        return (parts[1].body if parts[1].plain else body(parts[1].body, variables)).rstrip("\n")
    if any(token.kind == "redirection" for token in parts):
        return "${command}"
    if (found := _SOUGHT.fullmatch(" ".join(token.text for token in parts))) is not None:
        return found["name"]  # where it lies tells nothing: programs are known by their last name
    if parts[0].text not in {"echo", "expr", "seq"}:
        return "${command}"
    words = [one for token in parts[1:] for one in fields(token.text, variables)]
    if parts[0].text == "echo":
        return echoed(words)
    if parts[0].text == "seq":
        return counted_up(words)
    total = sum_of(" ".join(words), variables, depth)
    return "${command}" if total is None else str(total)


SUM = re.compile(r"\$\{sum:(\w+)\}")
"""A sum that lacks a variable."""


def total_of(text: str, variables: Variables, depth: int = 0) -> str:
    """What a sum comes to, or a word that names the first variable that nothing sets.

    >>> total_of("8*$1", {}), total_of("8*TP", {"TP": "2"}), total_of("NODES*8", {"NODES": "${1}"})
    ('${sum:1}', '16', '${sum:1}')
    """
    total = sum_of(text, variables, depth)
    if total is not None:
        return str(total)
    lacking = UNKNOWN.search(_reckoned(text, variables, depth)) if depth <= DEPTH and len(text) <= LONGEST_SUM else None
    if lacking is None:
        return "${arithmetic}"
    inner = SUM.fullmatch(lacking[0])
    name = inner[1] if inner else lacking[0][2:-1]
    return f"${{sum:{name}}}" if re.fullmatch(r"\w+", name) else "${arithmetic}"


_NAMES = re.compile(r"(?<![$\w{])([A-Za-z_]\w*)")


def _reckoned(text: str, variables: Variables, depth: int) -> str:
    """A sum with the values of its variables, which need no dollar there, and with what commands in it print."""
    named = ""
    at = 0
    for begin in re.finditer(r"\$\(|`", text):
        end = skipped(text, begin.start()) if begin.start() >= at else -1
        if end > 0:
            named += _NAMES.sub(r"${\1}", text[at : begin.start()]) + text[begin.start() : end]
            at = end
    return _nested(named + _NAMES.sub(r"${\1}", text[at:]), variables, depth + 1)


def sum_of(text: str, variables: Variables, depth: int = 0) -> int | None:
    """A sum of whole numbers and variables; None for anything else."""
    if depth > DEPTH or len(text) > LONGEST_SUM:
        return None
    plain = _reckoned(text, variables, depth)
    try:
        chosen = _CHOICE.sub(r"(\2) if (\1) else (\3)", plain.strip().replace("/", "//"))
        total = number_of(ast.parse(chosen, mode="eval").body) if len(plain) < 200 else None
    except (SyntaxError, *NO_NUMBER, RecursionError, MemoryError):
        return None
    return int(total) if isinstance(total, int) else None


EXPANSION = Expansion(fields, value, sum_of, total_of)
"""For conditions, and for what commands print: they hold words, which hold commands."""
