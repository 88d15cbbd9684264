"""Tokens of a script -> its commands and blocks, as bash groups them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import short
from clustersim.files.launch.shell_words import DEPTH, Token

_JOINS = {"&&", "||", "|", "|&"}
_ENDS = {";", "&", *_JOINS}
_FUNCTION = re.compile(r"[\w.:-]+")


@dataclass(frozen=True)
class Command:
    """Words, with the files that it reads or writes: (operator, word, lines behind ``<<``, whether they are plain)."""

    words: tuple[str, ...]
    line: int
    files: tuple[tuple[str, str, str, bool], ...] = ()


@dataclass(frozen=True)
class Condition:
    """``[[ ... ]]`` or ``(( ... ))``: words between, or a sum."""

    words: tuple[str, ...]
    line: int
    arithmetic: bool = False


@dataclass(frozen=True)
class Sequence:
    """Commands one after the other: each with what stands before it (``;``, ``&&``, ``||``, ``|``)."""

    items: tuple[tuple[str, Block], ...] = ()


@dataclass(frozen=True)
class Choice:
    """``if``: (condition, what follows) pairs, and what follows else."""

    arms: tuple[tuple[Sequence, Sequence], ...]
    otherwise: Sequence
    line: int


@dataclass(frozen=True)
class Match:
    """``case``: a word, and what follows each pattern."""

    word: str
    arms: tuple[tuple[tuple[str, ...], Sequence], ...]
    line: int


@dataclass(frozen=True)
class Loop:
    """``for`` over words (None where they are not listed), or ``while``: name is empty."""

    name: str
    words: tuple[str, ...] | None
    body: Sequence
    line: int


@dataclass(frozen=True)
class Group:
    """``{ ... }``, or ``( ... )`` whose variables are its own."""

    body: Sequence
    own: bool


@dataclass(frozen=True)
class Function:
    """A name for commands; ``text`` : they as words of a script, empty where lines stand behind ``<<`` among them."""

    name: str
    body: Block
    text: str = ""


@dataclass(frozen=True)
class Negation:
    """``!`` before a command."""

    body: Block


Block: TypeAlias = "Negation | Command | Condition | Sequence | Choice | Match | Loop | Group | Function"


def blocks(found: list[Token], where: str) -> Sequence:
    """What tokens say. Raises :class:`ScenarioError` where a block does not end, or ends that never began."""
    parser = _Parser(found, where)
    made = parser.sequence(())
    if parser.now is not None:
        raise parser.wrong(f"{short(parser.now.text)!r} ends nothing that began")
    return made


@dataclass
class _Parser:
    found: list[Token]
    where: str
    at: int = 0
    depth: int = field(default=0)

    @property
    def now(self) -> Token | None:
        """The token to be read next, None at the end."""
        return self.found[self.at] if self.at < len(self.found) else None

    def wrong(self, why: str) -> ScenarioError:
        """An error that names the line which is read."""
        line = self.now.line if self.now else self.found[-1].line if self.found else 1
        return ScenarioError(f"{self.where}: line {line}: {why}; is a part missing?")

    def _is(self, *texts: str) -> bool:
        return self.now is not None and self.now.text in texts and self.now.kind != "redirection"

    def _take(self, text: str) -> None:
        while self._is(";") and text != ";":
            self.at += 1
        if not self._is(text):
            have = f"{short(self.now.text)!r} stands" if self.now else "the script ends"
            raise self.wrong(f"{have} where {text!r} should")
        self.at += 1

    def sequence(self, until: tuple[str, ...]) -> Sequence:
        """Commands up to one of these words, which is left."""
        self.depth += 1
        if self.depth > DEPTH:
            raise self.wrong(f"blocks lie more than {DEPTH} deep")
        items: list[tuple[str, Block]] = []
        before = ";"
        while self.now is not None and not self._is(*until):
            if self.now.kind == "operator" and self.now.text in _ENDS:
                if self.now.text != ";" or before not in _JOINS:  # a line may end behind && and go on
                    before = self.now.text
                self.at += 1
                continue
            if self.now.kind == "operator" and self.now.text != "(":
                break
            items.append((before, self._block()))
            before = ";"
        self.depth -= 1
        return Sequence(tuple(items))

    def _block(self) -> Block:
        now = self.now
        if now is None:
            return Sequence(())
        if now.text in {"!", "time"} and now.kind == "word":
            self.at += 1
            if self.now is None or self.now.kind == "operator":
                return Command((now.text,), now.line)
            inner = self._block()
            return Negation(inner) if now.text == "!" else inner
        makers = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "{": self._braces,
            "(": self._brackets,
            "function": self._function,
            "[[": self._condition,
        }
        if now.text in makers:
            self.at += 1
            made = makers[now.text]()
            self._redirections()
            return made
        if now.text.startswith("((") and now.kind == "word":
            self.at += 1
            return Condition((now.text[2:-2],), now.line, arithmetic=True)
        return self._command()

    def _redirections(self) -> list[tuple[str, str, str, bool]]:
        found = []
        while self.now is not None and self.now.kind == "redirection":
            mark = self.now
            self.at += 1
            target = ""
            if mark.text not in {"<<", "<<-"} and self.now is not None and self.now.kind == "word":
                target = self.now.text
                self.at += 1
            found.append((mark.text, target, mark.body, mark.plain))
        return found

    def _command(self) -> Block:
        line = self.now.line if self.now is not None else 0
        words: list[str] = []
        files: list[tuple[str, str, str, bool]] = []
        while self.now is not None and self.now.kind != "operator":
            if self.now.kind == "redirection":
                files += self._redirections()
                continue
            words.append(self.now.text)
            self.at += 1
            if len(words) == 1 and self._is("(") and _FUNCTION.fullmatch(words[0]):
                following = self.found[self.at + 1 : self.at + 2]
                if following and following[0].text == ")":
                    self.at += 2
                    return self._named(words[0])
        if not words and not files:
            raise self.wrong(f"{short(self.found[self.at].text)!r} stands where a command should")
        return Command(tuple(words), line, tuple(files))

    def _named(self, name: str) -> Function:
        while self._is(";"):
            self.at += 1
        if self.now is None or self.now.kind == "redirection":
            raise self.wrong(f"the function {short(name)} has no body")
        begins = self.at
        body = self._block()
        inside = self.found[begins : self.at]
        return Function(name, body, "" if any(token.body for token in inside) else " ".join(t.text for t in inside))

    def _function(self) -> Block:
        if self.now is None or self.now.kind != "word":
            raise self.wrong("a function has no name")
        name = self.now.text
        self.at += 1
        if self._is("("):
            self.at += 1
            self._take(")")
        return self._named(name)

    def _if(self) -> Block:
        line = self.found[self.at - 1].line
        arms = []
        otherwise = Sequence()
        while True:
            test = self.sequence(("then",))
            self._take("then")
            arms.append((test, self.sequence(("elif", "else", "fi"))))
            if self._is("elif"):
                self.at += 1
                continue
            if self._is("else"):
                self.at += 1
                otherwise = self.sequence(("fi",))
            self._take("fi")
            return Choice(tuple(arms), otherwise, line)

    def _for(self) -> Block:
        line = self.found[self.at - 1].line
        head = self.now
        if head is None or head.kind != "word":
            raise self.wrong("a loop has no name")
        self.at += 1
        words: tuple[str, ...] | None = None
        if self._is("in"):
            self.at += 1
            first = self.at
            while self.now is not None and self.now.kind == "word":
                self.at += 1
            words = tuple(token.text for token in self.found[first : self.at])
        return Loop(head.text, words, self._do(), line)

    def _while(self) -> Block:
        line = self.found[self.at - 1].line
        self.sequence(("do",))
        return Loop("", None, self._do(), line)

    def _do(self) -> Sequence:
        self._take("do")
        body = self.sequence(("done",))
        self._take("done")
        return body

    def _case(self) -> Block:
        line = self.found[self.at - 1].line
        if self.now is None or self.now.kind != "word":
            raise self.wrong("case has no word")
        word = self.now.text
        self.at += 1
        self._take("in")
        arms = []
        while self._is(";"):
            self.at += 1
        while not self._is("esac"):
            if self._is("("):
                self.at += 1
            patterns = []
            while self.now is not None and not self._is(")"):
                if self.now.kind == "word":
                    patterns.append(self.now.text)
                self.at += 1
            self._take(")")
            arms.append((tuple(patterns), self.sequence(("esac",))))
            while self._is(";;", ";&", ";;&", ";"):
                self.at += 1
            if self.now is None:
                raise self.wrong("case does not end")
        self.at += 1
        return Match(word, tuple(arms), line)

    def _braces(self) -> Block:
        body = self.sequence(("}",))
        self._take("}")
        return Group(body, own=False)

    def _brackets(self) -> Block:
        body = self.sequence(())
        self._take(")")
        return Group(body, own=True)

    def _condition(self) -> Block:
        line = self.found[self.at - 1].line
        words = []
        while not self._is("]]"):
            if self.now is None:
                raise self.wrong("[[ does not end")
            words.append(self.now.text)
            self.at += 1
        self.at += 1
        return Condition(tuple(word for word in words if word != ";"), line)
