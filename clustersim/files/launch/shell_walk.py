"""A walk through a script's blocks: lists, conditions, loops and groups, as far as the script says what it does."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import short
from clustersim.files.launch import shell_blocks as grammar
from clustersim.files.launch.shell_expand import EXPANSION, fields, value
from clustersim.files.launch.shell_tests import arithmetic, compared
from clustersim.files.launch.shell_values import UNKNOWN, Variables, function_key, ranged

STEPS = 20_000
"""Commands that a script may come to: loops of loops would take hours."""
PASSES = 100
"""Of a loop over more words, as over ``{1..1000}``, the first pass is read."""
NESTED = 20
"""Functions, scripts and evaluated lines within each other."""

ASSIGNMENT = re.compile(r"(\w+)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)
"""A word that sets a variable: its name, its place in a list, whether it is added, and the value."""


@dataclass
class Script:
    """What a script says.

    command : words of the command that launches training. variables : as they are where it stands.
    directives : of its ``#SBATCH`` lines. notes : what was not followed. line : of the command.
    written : files that it writes itself (``cat > NAME <<EOF``), with their text. exported : of the command's
    environment, what is set. read : names of other scripts that it reads or runs.
    """

    command: list[str] = field(default_factory=list)
    variables: Variables = field(default_factory=dict)
    directives: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    line: int = 0
    written: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Candidate:
    """A command that may be the one that launches training."""

    words: list[str]
    line: int
    variables: Variables
    rank: tuple[int, int]


_RANGE = re.compile(r"\{(-?\d{1,4})\.\.(-?\d{1,4})(?:\.\.(-?\d{1,4}))?\}")
_LIST = re.compile(r"([^\s{}$'\"]*)\{([^\s{}$'\"]*,[^\s{}$'\"]*)\}([^\s{}$'\"]*)")


def braced(word: str) -> list[str]:
    """The words that braces make of one.

    >>> braced("{1..3}"), braced("{6..1..2}"), braced("lr{1,3}e-5"), braced("${A}"), braced("{1..$N}")
    (['1', '2', '3'], ['6', '4', '2'], ['lr1e-5', 'lr3e-5'], ['${A}'], ['{1..$N}'])
    """
    if numbers := _RANGE.fullmatch(word):
        first, last = int(numbers[1]), int(numbers[2])
        step = abs(int(numbers[3] or 1)) or 1
        return [str(number) for number in ranged(first, last, step if last >= first else -step)]
    if listed := _LIST.fullmatch(word):
        return [f"{listed[1]}{piece}{listed[3]}" for piece in listed[2].split(",")]
    return [word]


class Ended(Exception):
    """``exit`` or ``return`` was reached."""


def assigns(command: grammar.Command) -> bool:
    """Whether a command sets variables and nothing else."""
    return bool(command.words) and all(ASSIGNMENT.fullmatch(word) for word in command.words)


class BlockWalk(ABC):
    """What a script's blocks come to; a command is the reader's own."""

    def __init__(self, where: str, others: dict[str, str]) -> None:
        self.where = where
        self.others = others
        self.made = Script()
        self.candidates: list[Candidate] = []
        self.functions: dict[str, grammar.Block] = {}
        self.variables: Variables = {}
        self.missing: list[str] = []
        self.steps = 0
        self.depth = 0
        self.piped: str | None = None  # a text on its way from one command to the next
        self.before: list[str] = []  # words of launchers around the script that is read: srun ... bash -c

    def note(self, line: int, text: str) -> None:
        """Say what of a line is not followed."""
        said = f"{self.where}: line {line} {text}"
        if said not in self.made.notes:
            self.made.notes.append(said)

    @abstractmethod
    def command(self, command: grammar.Command) -> bool | None:
        """Follow a command; whether it succeeds, as far as the script tells."""

    def block(self, block: grammar.Block) -> bool | None:
        """Follow a block; whether it succeeds, as far as the script tells."""
        self.steps += 1
        if self.steps > STEPS:
            raise ScenarioError(f"{self.where}: comes to more than {STEPS:,} commands; is a loop meant to run so long?")
        match block:
            case grammar.Sequence():
                return self._sequence(block)
            case grammar.Command():
                return self.command(block)
            case grammar.Negation():
                answer = self.block(block.body)
                return None if answer is None else not answer
            case grammar.Condition():
                return self._condition(block)
            case grammar.Choice():
                self._choice(block)
            case grammar.Match():
                self._match(block)
            case grammar.Loop():
                self._loop(block)
            case grammar.Group():
                self._group(block)
            case grammar.Function():
                self.functions[block.name] = block.body
                self.variables[function_key(block.name)] = block.text
        return None

    def _sequence(self, sequence: grammar.Sequence) -> bool | None:
        answer: bool | None = True
        for before, one in sequence.items:
            if before == "&&" and answer is False:
                continue
            if before == "||" and answer is not False:  # what nobody can tell is taken to succeed
                continue
            if before == "&&" and answer is None and isinstance(one, grammar.Command) and assigns(one):
                self.note(one.line, "is done only where something holds that the script does not say; it is left out")
                continue
            answer = self.block(one)
        return answer

    def _choice(self, choice: grammar.Choice) -> None:
        for test, following in choice.arms:
            answer = self._tested(test)
            if answer is None:
                self.note(choice.line, "tests what the script does not say; what it does is left out")
                return
            if answer:
                self.block(following)
                return
        self.block(choice.otherwise)

    def _tested(self, test: grammar.Sequence) -> bool | None:
        """What a condition comes to; None where the script does not say."""
        answer: bool | None = None
        for i, (before, one) in enumerate(test.items):
            if i and before == "&&" and answer is False:
                continue
            if i and before == "||" and answer is True:
                continue
            now = self.block(one) if not isinstance(one, grammar.Command) else self._test_command(one)
            unknown = i > 0 and answer is None and before in {"&&", "||"}
            decides = (before == "&&" and now is False) or (before == "||" and now is True)
            answer = None if unknown and not decides else now
        return answer

    def _test_command(self, command: grammar.Command) -> bool | None:
        words = list(command.words)
        if words and words[0] in {"[", "test"}:
            return compared(words[1:-1] if words[0] == "[" else words[1:], self.variables, EXPANSION, patterns=False)
        if words in (["true"], [":"]):
            return True
        return False if words == ["false"] else None

    def _condition(self, condition: grammar.Condition) -> bool | None:
        if condition.arithmetic:
            return arithmetic(condition.words[0], self.variables, EXPANSION)
        return compared(list(condition.words), self.variables, EXPANSION, patterns=True)

    def _match(self, match: grammar.Match) -> None:
        held = value(match.word, self.variables)
        if UNKNOWN.search(held):
            self.note(match.line, "chooses by what the script does not say; what it does is left out")
            return
        for patterns, following in match.arms:
            if any(fnmatchcase(held, value(pattern, self.variables)) for pattern in patterns):
                self.block(following)
                return

    def _loop(self, loop: grammar.Loop) -> None:
        words = None
        if loop.words is not None:
            words = [one for word in loop.words for piece in braced(word) for one in fields(piece, self.variables)]
        if words is None or any(UNKNOWN.search(word) for word in words):
            self._once(loop)
            return
        before = len(self.candidates)
        for word in words if len(words) <= PASSES else words[:1]:
            self.variables[loop.name] = word
            self.block(loop.body)
        if len(self.candidates) > before + 1:
            self.note(loop.line, f"begins a loop over {short(' '.join(words))}; its first pass is read")
            del self.candidates[before + len(self.candidates[before:]) // max(len(words), 1) or before + 1 :]

    def _once(self, loop: grammar.Loop) -> None:
        """A loop of which nobody says how often: commands of one pass are met, what it sets is not known."""
        held = dict(self.variables)
        before = len(self.candidates)
        if loop.name:
            self.variables.pop(loop.name, None)
        with suppress(Ended):
            self.block(loop.body)
        self.variables = held
        read = len(self.candidates) > before
        self.note(loop.line, "begins a loop; one pass is read" if read else "begins a loop, which is not followed")

    def _group(self, group: grammar.Group) -> None:
        held = dict(self.variables) if group.own else self.variables
        try:
            self.block(group.body)
        except Ended:
            if not group.own:
                raise
        finally:
            self.variables = held
