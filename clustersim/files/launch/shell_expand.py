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
    word_fields = _Fields()
    _fill(word, variables, word_fields, split=split, depth=0)
    word_fields.end()
    return word_fields.done


def value(word: str, variables: Variables) -> str:
    """What a word comes to as the value of a variable: it is not split."""
    return " ".join(fields(word, variables, split=False))


def body(text: str, variables: Variables) -> str:
    """The lines behind ``<<`` with their variables."""
    word_fields = _Fields()
    _quoted(text, variables, word_fields, depth=0, escapes="$`\\\n")
    return word_fields.now or ""


def items(inside: str, variables: Variables) -> list[str]:
    """The words of a list, which stands between brackets."""
    item_words: list[str] = []
    for token in tokens(inside, "a list"):
        if token.kind == "word":
            item_words += fields(re.sub(r"^\[[^\]]*\]=", "", token.text), variables)
    return item_words


def by_key(inside: str, variables: Variables) -> dict[str, str]:
    """Of a list between brackets, what has a word for its place: ``[7b]=32``."""
    pairs = [re.fullmatch(r"\[([^\]]*)\]=(.*)", token.text, re.DOTALL) for token in tokens(inside, "a list")]
    keyed = {value(pair[1], variables): value(pair[2], variables) for pair in pairs if pair}
    return {key: held_value for key, held_value in keyed.items() if not key.isdecimal()}


def _fill(word: str, variables: Variables, word_fields: _Fields, *, split: bool, depth: int) -> None:
    offset = 0
    while offset < len(word):
        char = word[offset]
        end = skipped(word, offset)
        end = len(word) if end < 0 else end
        if char == "'":
            word_fields.put(word[offset + 1 : end - 1])
        elif char == '"':
            word_fields.put("")
            inside = word[offset + 1 : end - 1]
            if re.fullmatch(r"\$(\{\w+\[[@]\]\}|@|\{@\})", inside) and word_fields.now == "":
                word_fields.now = None  # of an empty list there is no word at all
            _quoted(inside, variables, word_fields, depth=depth)
        elif char == "\\":
            word_fields.put(word[offset + 1 : offset + 2])
        elif word.startswith("$'", offset):
            end = skipped(word, offset + 1)
            word_fields.put(word[offset + 2 : end - 1])
        elif char in "$`":
            result, end = _substituted(word, offset, variables, depth)
            joined = text_of(result) if result is not None else None
            if joined is None:
                word_fields.put(char)
            elif isinstance(result, list):
                for i, piece in enumerate(result):
                    if i:
                        word_fields.end()
                    word_fields.split(piece)
            elif split:
                word_fields.split(joined)
            else:
                word_fields.put(joined)
        elif word.startswith(("<(", ">("), offset):
            word_fields.put("${command}")
        else:
            end = offset + 1
            word_fields.put(char)
        offset = end


def _quoted(text: str, variables: Variables, word_fields: _Fields, *, depth: int, escapes: str = '$`"\\\n') -> None:
    offset = 0
    while offset < len(text):
        char = text[offset]
        if char == "\\" and text[offset + 1 : offset + 2] and text[offset + 1] in escapes:
            word_fields.put("" if text[offset + 1] == "\n" else text[offset + 1])
            offset += 2
        elif char in "$`":
            result, offset = _substituted(text, offset, variables, depth)
            if result is None:
                word_fields.put(char)
            elif isinstance(result, list):
                word_fields.many(result)
            else:
                word_fields.put(result)
        else:
            word_fields.put(char)
            offset += 1


def _substituted(text: str, offset: int, variables: Variables, depth: int) -> tuple[str | list[str] | None, int]:
    """What a ``$...`` or a backquote comes to, and where it ends; None for a dollar that is only that."""
    if depth > DEPTH:
        raise ScenarioError(f"a script's {short(text)!r} holds substitutions more than {DEPTH} deep")
    end = skipped(text, offset)
    if text.startswith("$((", offset) and text[:end].endswith("))"):
        return total_of(text[offset + 3 : end - 2], variables, depth + 1), end
    if text.startswith("$(", offset) and end > 0:
        return _command(text[offset + 2 : end - 1], variables, depth + 1), end
    if text[offset] == "`" and end > 0:
        return _command(text[offset + 1 : end - 1], variables, depth + 1), end
    if text.startswith("${", offset) and end > 0:
        return _parameter(text[offset + 2 : end - 1], variables, depth + 1), end
    name = _NAME.match(text, offset + 1) if text[offset] == "$" else None
    if name is None:
        return None, offset + 1
    held_value = variables.get(name[0])
    if isinstance(held_value, list) and name[0] not in "@*":
        held_value = held_value[0] if held_value else ""
    return (f"${{{name[0]}}}" if held_value is None else held_value), name.end()


def _parameter(inside: str, variables: Variables, depth: int) -> str | list[str]:
    """``${inside}``: a variable, with what is to be done to it."""
    unknown = f"${{{inside}}}" if re.fullmatch(r"\w+", inside) else "${" + re.sub(r"[^\w@*].*", "", inside) + "}"
    parts = _PARAMETER.fullmatch(inside)
    if parts is None:
        return unknown
    held_value = variables.get(parts["name"])
    index = parts["at"]
    keyed = variables.get(f"{parts['name']}[{value(index, variables)}]") if index else None
    if keyed is not None:
        held_value = keyed
    elif isinstance(held_value, list) and index not in {"@", "*"} and parts["name"] not in "@*":
        place = sum_of(index, variables, depth) if index else 0
        held_value = (
            held_value[place]
            if place is not None and -len(held_value) <= place < len(held_value)
            else ""
            if place is not None
            else None
        )
    elif isinstance(held_value, str) and index in {"@", "*"}:
        held_value = [held_value] if held_value else []
    op = parts["op"]
    rest = parts["rest"]
    if parts["count"]:
        return unknown if held_value is None else str(len(held_value))
    if op and op[-1] in "-=+?" and op[0] in ":-=+?":
        return _default(parts["name"], held_value, op, rest, variables, depth, unknown)
    if held_value is None:
        return unknown
    if not op and not rest:
        return text_of(held_value) if index == "*" else held_value
    return _edited(text_of(held_value), op, rest, variables, unknown)


def _default(
    name: str, held_value: str | list[str] | None, op: str, rest: str, variables: Variables, depth: int, unknown: str
) -> str | list[str]:
    is_set = held_value is not None and (bool(held_value) or not op.startswith(":"))
    if op[-1] == "?":
        return held_value if held_value is not None else unknown
    if op[-1] == "+":
        return _nested(rest, variables, depth) if is_set else ""
    if is_set and held_value is not None:
        return held_value
    word_fields = _nested(rest, variables, depth)
    if op[-1] == "=":
        variables[name] = word_fields
    return word_fields


def _nested(word: str, variables: Variables, depth: int) -> str:
    word_fields = _Fields()
    _fill(word, variables, word_fields, split=False, depth=depth)
    word_fields.end()
    return " ".join(word_fields.done)


def _edited(held_value: str, op: str, rest: str, variables: Variables, unknown: str) -> str:
    if UNKNOWN.search(held_value):
        return unknown
    if op in {"#", "##", "%", "%%"}:
        return trimmed(held_value, op, value(rest, variables))
    if op in {"/", "//"}:
        old, _, new = rest.partition("/")
        old = value(old, variables)
        if not old or re.search(r"[*?\[]", old):
            return unknown if old else held_value
        return held_value.replace(old, value(new, variables), 1 if op == "/" else -1)
    if op in {"^^", ",,"}:
        return held_value.upper() if op == "^^" else held_value.lower()
    if op == ":":
        start, _, length = rest.partition(":")
        first = sum_of(start, variables, 0)
        count = sum_of(length, variables, 0) if length else len(held_value)
        if first is not None and count is not None and first >= 0 and count >= 0:
            return held_value[first : first + count]
    return unknown


_SOUGHT = re.compile(r"(which|command -v|type -p) (?P<name>[\w.-]+)")
"""A program that is looked for by its name."""


def _command(inside: str, variables: Variables, depth: int) -> str:
    """What a command says that only repeats, adds up or finds: ``echo``, ``expr``, ``cat <<``, ``which``."""
    if depth > DEPTH:
        raise ScenarioError(f"a script's {short(inside)!r} holds substitutions more than {DEPTH} deep")
    parts = tokens(inside.strip(), "a command")
    is_own = bool(parts) and bool(variables.get(function_key(parts[0].text)))
    if is_own or any((part.kind == "operator" and part.text != ";") or part.text in {"if", "<<<"} for part in parts):
        return printed(parts, variables, EXPANSION)
    parts = [token for token in parts if token.text != ";"]
    if not parts:
        return "${command}"
    if parts[0].text == "cat" and len(parts) == 2 and parts[1].body:
        return (parts[1].body if parts[1].plain else body(parts[1].body, variables)).rstrip("\n")
    if any(token.kind == "redirection" for token in parts):
        return "${command}"
    if (sought := _SOUGHT.fullmatch(" ".join(token.text for token in parts))) is not None:
        return sought["name"]  # where it lies tells nothing: programs are known by their last name
    if parts[0].text not in {"echo", "expr", "seq"}:
        return "${command}"
    arguments = [part for token in parts[1:] for part in fields(token.text, variables)]
    if parts[0].text == "echo":
        return echoed(arguments)
    if parts[0].text == "seq":
        return counted_up(arguments)
    total = sum_of(" ".join(arguments), variables, depth)
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
    offset = 0
    for begin in re.finditer(r"\$\(|`", text):
        end = skipped(text, begin.start()) if begin.start() >= offset else -1
        if end > 0:
            named += _NAMES.sub(r"${\1}", text[offset : begin.start()]) + text[begin.start() : end]
            offset = end
    return _nested(named + _NAMES.sub(r"${\1}", text[offset:]), variables, depth + 1)


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
