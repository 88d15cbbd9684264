"""A launch script's words: variables, lists, conditions, functions and plain loops are followed; nothing is run.

Read by hand: bashlex 0.18, which is maintained and parses bash, has no lists ``A=(...)``, no ``$((...))``, no ``[[``
and no ``case``, which launch scripts are made of; tree-sitter-bash makes a tree and leaves the rest to be done.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import short
from clustersim.files.launch import shell_blocks as grammar
from clustersim.files.launch.shell_expand import UNKNOWN, Variables, body, fields, items, sum_of, text_of, value
from clustersim.files.launch.shell_words import tokens

STEPS = 20_000
"""Commands that a script may come to: loops of loops would take hours."""
NESTED = 20
"""Functions, scripts and evaluated lines within each other."""

_ASSIGNMENT = re.compile(r"(\w+)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_QUIET = {
    "echo",
    "printf",
    "cd",
    "mkdir",
    "ulimit",
    "module",
    "conda",
    "pip",
    "pip3",
    "git",
    "wget",
    "curl",
    "sleep",
    "set",
    "trap",
    "wait",
    "rm",
    "cp",
    "mv",
    "ls",
    "pwd",
    "date",
    "hostname",
    "which",
    "huggingface-cli",
    "apt-get",
}
_SHELLS = {"bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash"}
LAUNCHERS = {
    "torchrun",
    "deepspeed",
    "accelerate",
    "srun",
    "mpirun",
    "mpiexec",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
    "tune",
    "axolotl",
    "llamafactory-cli",
    "colossalai",
}
"""What starts ranks."""
_COMPARED = {
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks_per_node": ("SLURM_NTASKS_PER_NODE",),
    "gpus_per_node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
}
"""Variables that Slurm sets from what ``#SBATCH`` lines ask for."""
DIRECTIVES = {
    "N": "nodes",
    "n": "ntasks",
    "G": "gpus",
    "J": "job_name",
    "p": "partition",
    "t": "time",
    "c": "cpus_per_task",
}
"""Short options of sbatch and srun."""

_NO_COMMAND = "holds no command with options; write it like torchrun ... pretrain_gpt.py --num-layers 32"


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


def script(text: str, where: str, others: Mapping[str, str] | None = None) -> Script:
    """The words of the command that launches training. Nothing is run.

    others : texts of scripts that were given beside it, by file name: those that it reads or runs are followed.

    Raises :class:`ScenarioError` for a script that ends within a quote or a list, or has no such command.
    """
    reader = _Reader(where, dict(others or {}))
    reader.directed(text)
    reader.text(text, where)
    return reader.chosen()


class _Ended(Exception):
    """``exit`` or ``return`` was reached."""


class _Reader:
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
        self.before: list[str] = []  # words of launchers around the script that is read: srun ... bash -c

    def note(self, line: int, text: str) -> None:
        said = f"{self.where}: line {line} {text}"
        if said not in self.made.notes:
            self.made.notes.append(said)

    def directed(self, text: str) -> None:
        """``#SBATCH`` lines, and what Slurm makes of them."""
        for line in text.splitlines():
            if line.startswith("#SBATCH"):
                words = fields_of_line(re.sub(r"\s#.*", "", line[7:]))
                self.made.directives += words
        for name, said in directed_options(self.made.directives).items():
            for variable in _SLURM.get(name, ()):
                self.variables[variable] = said
        per_node = self.variables.get("SLURM_NTASKS_PER_NODE")
        nodes = self.variables.get("SLURM_NNODES")
        if per_node and nodes and "SLURM_NTASKS" not in self.variables:
            total = sum_of(f"{per_node}*{nodes}", {})
            if total is not None:
                self.variables["SLURM_NTASKS"] = str(total)

    def text(self, text: str, where: str) -> None:
        """Follow a script's text."""
        self.depth += 1
        if self.depth > NESTED:
            raise ScenarioError(f"{where}: scripts and functions run each other more than {NESTED} deep")
        try:
            self.block(grammar.blocks(tokens(text, where), where))
        except _Ended:
            pass
        finally:
            self.depth -= 1

    def chosen(self) -> Script:
        """The command of those that were met."""
        if not self.candidates:
            if self.missing:
                names = " and ".join(self.missing)
                raise ScenarioError(f"{self.where}: runs or reads {names}, which was not given; give that file too")
            raise ScenarioError(f"{self.where}: {_NO_COMMAND}")
        best = max(self.candidates, key=lambda one: one.rank)
        others = {one.line for one in self.candidates if one.rank[0] == best.rank[0] > 0 and one.words != best.words}
        if others:
            lines = ", ".join(map(str, sorted(others)))
            self.note(
                best.line, f"has the command that is read; there are more commands that start ranks (line {lines})"
            )
        self.made.command = best.words
        self.made.line = best.line
        self.made.variables = best.variables
        return self.made

    # ---- blocks --------------------------------------------------------------------------------------------------

    def block(self, block: grammar.Block) -> bool | None:
        """Follow a block; whether it succeeds, as far as the script tells."""
        self.steps += 1
        if self.steps > STEPS:
            raise ScenarioError(f"{self.where}: comes to more than {STEPS:,} commands; is a loop meant to run so long?")
        match block:
            case grammar.Sequence():
                return self._sequence(block)
            case grammar.Command():
                return self._command(block)
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
        return None

    def _sequence(self, sequence: grammar.Sequence) -> bool | None:
        answer: bool | None = True
        for before, one in sequence.items:
            if before == "&&" and answer is False:
                continue
            if before == "||" and answer is not False:  # what nobody can tell is taken to succeed
                continue
            if before == "&&" and answer is None and isinstance(one, grammar.Command) and _assigns(one):
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
            return self._compared(words[1:-1] if words[0] == "[" else words[1:], patterns=False)
        if words in (["true"], [":"]):
            return True
        return False if words == ["false"] else None

    def _condition(self, condition: grammar.Condition) -> bool | None:
        if condition.arithmetic:
            return self._arithmetic(condition.words[0])
        return self._compared(list(condition.words), patterns=True)

    def _arithmetic(self, text: str) -> bool | None:
        assigned = re.fullmatch(r"\s*(\w+)\s*=(?!=)(.*)", text, re.DOTALL)
        stepped = re.fullmatch(r"\s*(?:(\w+)(\+\+|--)|(\+\+|--)(\w+))\s*", text)
        if assigned or stepped:
            name = assigned[1] if assigned else stepped[1] or stepped[4] if stepped else ""
            total = sum_of(
                assigned[2] if assigned else f"{name}{(text.strip().strip(name) or '+')[0]}1", self.variables
            )
            self.variables[name] = "${arithmetic}" if total is None else str(total)
            return None if total is None else total != 0
        compared = re.fullmatch(r"(.+?)\s*(==|!=|<=|>=|<|>)\s*(.+)", text.strip(), re.DOTALL)
        if compared is None or "&&" in text or "||" in text:
            total = sum_of(text, self.variables)
            return None if total is None else total != 0
        left = sum_of(compared[1], self.variables)
        right = sum_of(compared[3], self.variables)
        return None if left is None or right is None else bool(_COMPARED[compared[2]](left, right))

    def _compared(self, words: list[str], *, patterns: bool) -> bool | None:
        """What the words of ``[ ... ]`` come to."""
        for joint, alternative in (({"||", "-o"}, True), ({"&&", "-a"}, False)):
            at = next((i for i, word in enumerate(words) if word in joint), None)
            if at is not None:
                sides = [self._compared(side, patterns=patterns) for side in (words[:at], words[at + 1 :])]
                if alternative in sides:
                    return alternative
                return None if None in sides else not alternative
        if words[:1] == ["!"]:
            answer = self._compared(words[1:], patterns=patterns)
            return None if answer is None else not answer
        if words[:1] == ["("] and words[-1:] == [")"]:
            return self._compared(words[1:-1], patterns=patterns)
        if len(words) == 2 and words[0] in {"-z", "-n", "-v"}:
            # What nothing in the script sets is taken to be empty, as where it runs alone.
            held = (
                UNKNOWN.sub("", value(words[1], self.variables))
                if words[0] != "-v"
                else text_of(self.variables.get(words[1], ""))
            )
            return (held == "") == (words[0] == "-z")
        if len(words) == 1:
            held = value(words[0], self.variables)
            return None if UNKNOWN.search(held) else held != ""
        if len(words) != 3 or words[1] not in _COMPARED:
            return None
        left = value(words[0], self.variables)
        right = value(words[2], self.variables)
        if UNKNOWN.search(left + right):
            return None
        if words[1].startswith("-"):
            a = sum_of(left, {})
            b = sum_of(right, {})
            return None if a is None or b is None else bool(_COMPARED[words[1]](a, b))
        if patterns and words[1] in {"==", "=", "!="} and not words[2].startswith(("'", '"')):
            return fnmatchcase(left, right) != (words[1] == "!=")
        return bool(_COMPARED[words[1]](left, right))

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
        words = None if loop.words is None else [one for word in loop.words for one in fields(word, self.variables)]
        if words is None or any(UNKNOWN.search(word) for word in words):
            self.note(loop.line, "begins a loop, which is not followed")
            return
        before = len(self.candidates)
        for word in words:
            self.variables[loop.name] = word
            self.block(loop.body)
        if len(self.candidates) > before + 1:
            self.note(loop.line, f"begins a loop over {short(' '.join(words))}; its first pass is read")
            del self.candidates[before + len(self.candidates[before:]) // max(len(words), 1) or before + 1 :]

    def _group(self, group: grammar.Group) -> None:
        held = dict(self.variables) if group.own else self.variables
        try:
            self.block(group.body)
        except _Ended:
            if not group.own:
                raise
        finally:
            self.variables = held

    # ---- commands ------------------------------------------------------------------------------------------------

    def _command(self, command: grammar.Command) -> bool | None:
        words = list(command.words)
        first = 0
        while first < len(words) and _ASSIGNMENT.fullmatch(words[first]):
            first += 1
        held = dict(self.variables)
        expanded = [one for word in words[first:] for one in fields(word, held)]
        for word in words[:first]:
            self._assign(word)
        if first < len(words):
            answer = self._called(command, words[first:], expanded)
            for found in map(_ASSIGNMENT.fullmatch, words[:first]):  # which were the command's alone
                name = found[1] if found else ""
                self.variables.pop(name, None)
                if name in held:
                    self.variables[name] = held[name]
            return answer
        return True if words else None

    def _assign(self, word: str) -> None:
        found = _ASSIGNMENT.fullmatch(word)
        assert found is not None
        name, index, more, written = found.groups()
        before = self.variables.get(name)
        if written.startswith("("):
            made = items(written[1:-1], self.variables)
            self.variables[name] = (
                ([before] if isinstance(before, str) else list(before or [])) + made if more else made
            )
        elif index is not None:
            listed = [before] if isinstance(before, str) else list(before or [])
            place = sum_of(index, self.variables)
            if place is not None and 0 <= place < 10_000:
                listed += [""] * (place + 1 - len(listed))
                listed[place] = value(written, self.variables)
            self.variables[name] = listed
        elif more and isinstance(before, list):
            self.variables[name] = [*before[:-1], (before[-1] if before else "") + value(written, self.variables)]
        else:
            self.variables[name] = (text_of(before or "") if more else "") + value(written, self.variables)

    def _called(self, command: grammar.Command, raw: list[str], words: list[str]) -> bool | None:
        """A command's words: what changes variables is done, what launches is kept."""
        self._files(command, words)
        name = words[0] if words else ""
        if name in _DECLARES:
            for word in raw[1:]:
                if _ASSIGNMENT.fullmatch(word):
                    self._assign(word)
            return True
        if name in self.functions:
            self._function(name, words[1:])
            return None
        if name in {"exit", "return"}:
            raise _Ended
        if name in {"source", "."} and len(words) > 1:
            self._read(words[1], command.line, words[2:])
            return None
        if name in {"[", "test", "true", "false", ":"}:
            return self._test_command(grammar.Command(tuple(raw), command.line))
        if name == "eval":
            self.text(" ".join(words[1:]), f"{self.where} (line {command.line})")
            return None
        if name == "set" and "--" in words:
            self._positions(words[words.index("--") + 1 :])
            return None
        if name == "shift":
            held = self.variables.get("@")
            if isinstance(held, list):
                self._positions(held[int(words[1]) if words[1:] and words[1].isdecimal() else 1 :])
            return None
        if name == "unset":
            for word in words[1:]:
                self.variables.pop(word, None)
            return None
        if name == "let":
            for word in words[1:]:
                self._arithmetic(word)
            return None
        if name in _QUIET:
            return None
        self._launched(command, words)
        return None

    def _function(self, name: str, arguments: list[str]) -> None:
        self.depth += 1
        if self.depth > NESTED:
            raise ScenarioError(f"{self.where}: functions call each other more than {NESTED} deep")
        outer = {key: held for key, held in self.variables.items() if key in {"@", "*", "#"} or key.isdecimal()}
        self._positions(arguments)
        try:
            self.block(self.functions[name])
        except _Ended:
            pass
        finally:
            self.depth -= 1
            for key in [key for key in self.variables if key in {"@", "*", "#"} or key.isdecimal()]:
                del self.variables[key]
            self.variables.update(outer)

    def _positions(self, arguments: list[str]) -> None:
        for key in [key for key in self.variables if key.isdecimal()]:
            del self.variables[key]
        self.variables["@"] = list(arguments)
        self.variables["*"] = list(arguments)
        self.variables["#"] = str(len(arguments))
        self.variables.update({str(i): word for i, word in enumerate(arguments, 1)})

    def _read(self, path: str, line: int, arguments: list[str]) -> None:
        """``source PATH``."""
        name = path.rsplit("/", 1)[-1]
        if name in self.others:
            self.made.read.add(name)
            self.text(self.others[name], name)
            return
        self.missing.append(UNKNOWN.sub("", short(path)).lstrip("/"))
        self.note(line, f"reads {short(path)}, which was not given; what it sets is not known here")

    def _files(self, command: grammar.Command, words: list[str]) -> None:
        """Files that a command writes from lines in the script, and variables that it reads from them."""
        texts = [
            lines if plain else body(lines, self.variables)
            for mark, _, lines, plain in command.files
            if mark.startswith("<<") and mark != "<<<"
        ]
        if not texts:
            return
        name = words[0] if words else ""
        targets = [value(target, self.variables) for mark, target, *_ in command.files if mark.startswith((">", "&>"))]
        if name == "tee":
            targets += [word for word in words[1:] if not word.startswith("-")]
        if name in {"cat", "tee"} and targets:
            self.made.written[targets[0].rsplit("/", 1)[-1]] = texts[0]
        elif name in {"sbatch", *_SHELLS}:
            self.made.directives += words[1:] if name == "sbatch" else []
            self.directed(texts[0])
            self.text(texts[0], f"{self.where} (line {command.line})")
        elif name == "read" and words[-1:] and re.fullmatch(r"[A-Za-z_]\w*", words[-1]):
            self.variables[words[-1]] = texts[0].strip("\n")

    def _launched(self, command: grammar.Command, words: list[str]) -> None:
        """A command that may launch training, or a shell with the line or the script that it is given."""
        at = next((i for i, word in enumerate(words[:-1]) if word in _SHELLS), None)
        if at is not None:
            flags = at + 1
            while flags < len(words) - 1 and words[flags].startswith("-") and "c" not in words[flags].lstrip("-"):
                flags += 1
            around = self.before
            self.before = [*around, *words[:at]]
            if re.fullmatch(r"-\w*c", words[flags]) and flags + 1 < len(words):
                self._within(words[flags + 1], command.line, words[flags + 2 :])
            else:
                self._script(words[flags], command.line, words[flags + 1 :])
            self.before = around
            return
        if words and words[0] in {"ssh", "pdsh"} and " " in words[-1]:
            self._within(words[-1], command.line, [])
            return
        scripts = [word for word in words if word.endswith(".sh") and not word.startswith("-")]
        if scripts and (words[0] in {"srun", "sbatch", "mpirun", "mpiexec"} or words[0] == scripts[0]):
            at = words.index(scripts[0])
            around = self.before
            self.before = [*around, *words[:at]]
            self._script(scripts[0], command.line, words[at + 1 :])
            self.before = around
            return
        own = _parts(words)
        count = sum(word.startswith("--") for word in own)
        if own[0].startswith("--") and self.candidates:
            self.note(
                command.line,
                "begins with an option: a comment or a missing backslash has ended the command before it, and it is "
                "left out as bash leaves it out",
            )
            return
        whole = [*_parts(self.before), *own]
        starts = any(word.rsplit("/", 1)[-1] in LAUNCHERS for word in whole)
        trains = any(word.endswith(".py") or word == "-m" for word in own)
        if count or trains or any(word.rsplit("/", 1)[-1] in LAUNCHERS for word in own):
            self.candidates.append(Candidate(whole, command.line, dict(self.variables), (2 * starts + trains, count)))

    def _within(self, text: str, line: int, arguments: list[str]) -> None:
        """The line that a shell is given."""
        held = dict(self.variables)
        if arguments:
            self._positions(arguments[1:])
        self.text(text, f"{self.where} (line {line})")
        self.variables = held

    def _script(self, path: str, line: int, arguments: list[str]) -> None:
        """Another script that is run."""
        name = path.rsplit("/", 1)[-1]
        if name not in self.others:
            if name.endswith((".sh", ".sbatch", ".slurm", ".bash")):
                self.missing.append(short(path))
                self.note(line, f"runs {short(path)}, which was not given")
            return
        held = dict(self.variables)
        self.made.read.add(name)
        self._positions(arguments)
        self.directed(self.others[name])
        self.text(self.others[name], name)
        self.variables = held


def _parts(words: list[str]) -> list[str]:
    """Words with those apart that hold several options."""
    return [part for word in words for part in (word.split() if word.strip().startswith("--") else [word])]


def _assigns(command: grammar.Command) -> bool:
    return bool(command.words) and all(_ASSIGNMENT.fullmatch(word) for word in command.words)


def fields_of_line(line: str) -> list[str]:
    """Words of a line without variables."""
    return [one for token in tokens(line, "a line") if token.kind == "word" for one in fields(token.text, {})]


def directed_options(words: list[str]) -> dict[str, str]:
    """Options of sbatch or srun by their long names, with ``_``; ``gpus_per_node`` from ``--gres`` too."""
    found: dict[str, str] = {}
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if word.startswith("--"):
            name, equals, said = word[2:].partition("=")
            if not equals and i < len(words) and not words[i].startswith("-"):
                said = words[i]
                i += 1
            found[name.replace("-", "_")] = said
        elif re.fullmatch(r"-[A-Za-z].*", word) and word[1] in DIRECTIVES:
            said = word[2:].lstrip("=")
            if not said and i < len(words):
                said = words[i]
                i += 1
            found[DIRECTIVES[word[1]]] = said
    gres = re.search(r"\bgpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?", found.get("gres", ""))
    if gres:
        found.setdefault("gpus_per_node", gres[1] or "1")
    for name in ("gpus_per_node", "gpus"):
        counted = re.fullmatch(r"[A-Za-z][\w.-]*:(\d+)", found.get(name, ""))
        if counted:
            found[name] = counted[1]
    per_node = re.fullmatch(r"(\d+)\(x\d+\)", found.get("ntasks_per_node", ""))
    if per_node:
        found["ntasks_per_node"] = per_node[1]
    return found
