"""A launch script's words: variables, lists, conditions, functions and plain loops are followed; nothing is run.

Read by hand: bashlex 0.18, which is maintained and parses bash, has no lists ``A=(...)``, no ``$((...))``, no ``[[``
and no ``case``, which launch scripts are made of; tree-sitter-bash makes a tree and leaves the rest to be done.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import short
from clustersim.files.launch import primus_commands, unread
from clustersim.files.launch import shell_blocks as grammar
from clustersim.files.launch.shell_directives import LAUNCHERS, directed_options
from clustersim.files.launch.shell_expand import EXPANSION, body, by_key, fields, items, sum_of, value
from clustersim.files.launch.shell_tests import arithmetic
from clustersim.files.launch.shell_values import UNKNOWN, text_of
from clustersim.files.launch.shell_walk import ASSIGNMENT, NESTED, BlockWalk, Candidate, Ended, Script
from clustersim.files.launch.shell_words import tokens

_DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_QUIET_NAMES = """
echo printf cd mkdir ulimit module conda pip pip3 git wget curl sleep set trap wait rm cp mv ls pwd date hostname which
huggingface-cli apt-get
"""
_QUIET = frozenset(_QUIET_NAMES.split())
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
"""Endings of scripts, whatever their text looks like."""
_SHELLS = {"bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash"}
ELSEWHERE = frozenset({"ssh", "pdsh", "tmux", "screen", "script"})
"""Commands that have a line run on other machines or terminals, which they are given as one word."""
LONGEST = 1_000_000
"""Characters of a file that a script makes of another."""
_EDIT = re.compile(r"s([/|,#])(\w+)\1(.*)\1(g?)", re.DOTALL)
"""An edit of sed that exchanges a word for a text."""
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks_per_node": ("SLURM_NTASKS_PER_NODE",),
    "gpus_per_node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
}
"""Variables that Slurm sets from what ``#SBATCH`` lines ask for."""
_NO_COMMAND = "holds no command with options; write it like torchrun ... pretrain_gpt.py --num-layers 32"


def script(text: str, where: str, others: Mapping[str, str] | None = None) -> Script:
    """The words of the command that launches training. Nothing is run.

    others : texts of scripts that were given beside it, by file name: those that it reads or runs are followed.

    Raises :class:`ScenarioError` for a script that ends within a quote or a list, or has no such command.
    """
    reader = _Reader(where, dict(others or {}))
    reader.directed(text)
    reader.text(text, where)
    return reader.chosen()


class _Reader(BlockWalk):
    """Commands of a script: what sets variables is done, what launches is kept."""

    def directed(self, text: str, submitted: Sequence[str] = ()) -> None:
        """``#SBATCH`` lines, and what Slurm makes of them; ``submitted``, words of ``sbatch`` itself, count against
        them."""
        for line in text.splitlines():
            if line.startswith("#SBATCH"):
                words = fields_of_line(re.sub(r"\s#.*", "", line[7:]))
                self.made.directives += words
        self.made.directives += submitted
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
        except Ended:
            pass
        finally:
            self.depth -= 1

    def chosen(self) -> Script:
        """The command of those that were met."""
        other = unread.of_command(self.missing)
        if other is not None:
            raise ScenarioError(f"{self.where}: {other.refusal}")
        if not self.candidates:
            if self.missing:
                names = " and ".join(dict.fromkeys(self.missing))
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

    # ---- commands ------------------------------------------------------------------------------------------------

    def command(self, command: grammar.Command) -> bool | None:
        """Follow a command; whether it succeeds, as far as the script tells."""
        words = list(command.words)
        first = 0
        while first < len(words) and ASSIGNMENT.fullmatch(words[first]):
            first += 1
        held = dict(self.variables)
        expanded = [one for word in words[first:] for one in fields(word, held)]
        self.variables.update({name: held[name] for name in held.keys() - self.variables.keys()})  # ${NAME:=value}
        for word in words[:first]:
            self._assign(word)
        if first < len(words):
            answer = self._called(command, words[first:], expanded)
            for found in map(ASSIGNMENT.fullmatch, words[:first]):  # which were the command's alone
                name = found[1] if found else ""
                self.variables.pop(name, None)
                if name in held:
                    self.variables[name] = held[name]
            return answer
        return True if words else None

    def _assign(self, word: str) -> None:
        found = ASSIGNMENT.fullmatch(word)
        if found is None:
            return
        name, index, more, written = found.groups()
        before = self.variables.get(name)
        if written.startswith("("):
            made = items(written[1:-1], self.variables)
            self.variables |= {f"{name}[{key}]": one for key, one in by_key(written[1:-1], self.variables).items()}
            self.variables[name] = (
                ([before] if isinstance(before, str) else list(before or [])) + made if more else made
            )
        elif index is not None:
            listed = [before] if isinstance(before, str) else list(before or [])
            place = sum_of(index, self.variables)
            if place is None:
                self.variables[f"{name}[{value(index, self.variables)}]"] = value(written, self.variables)
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
                if ASSIGNMENT.fullmatch(word):
                    self._assign(word)
            return True
        if name in self.functions:
            self._function(name, words[1:])
            return None
        if name == "exit" and words[1:2] and words[1] != "0":  # of a check that whoever runs it has met
            return None
        if name in {"exit", "return"}:
            raise Ended
        if name in {"source", "."} and len(words) > 1:
            self._read(words[1], command.line, words[2:])
            return None
        if name in {"[", "test", "true", "false", ":"}:
            return self._test_command(grammar.Command(tuple(raw), command.line))
        if name == "eval":
            self.text(" ".join(words[1:]), f"{self.where} (line {command.line})")
            return None
        if name == "sed":
            self._edited(command, words[1:])
        elif not self._sets(name, words) and (name not in _QUIET or words[:2] == ["conda", "run"]):
            self._launched(command, words)
        return None

    def _sets(self, name: str, words: list[str]) -> bool:
        """What ``set --``, ``shift``, ``unset`` and ``let`` do to variables; whether it is one of them."""
        if name == "set" and "--" in words:
            self._positions(words[words.index("--") + 1 :])
        elif name == "shift":
            held = self.variables.get("@")
            if isinstance(held, list):
                self._positions(held[int(words[1]) if words[1:] and words[1].isdecimal() else 1 :])
        elif name == "unset":
            for word in words[1:]:
                self.variables.pop(word, None)
        elif name == "let":
            for word in words[1:]:
                arithmetic(word, self.variables, EXPANSION)
        else:
            return False
        return True

    def _function(self, name: str, arguments: list[str]) -> None:
        self.depth += 1
        if self.depth > NESTED:
            raise ScenarioError(f"{self.where}: functions call each other more than {NESTED} deep")
        outer = {key: held for key, held in self.variables.items() if key in {"@", "*", "#"} or key.isdecimal()}
        self._positions(arguments)
        try:
            self.block(self.functions[name])
        except Ended:
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
        for mark, target, *_ in command.files:
            if mark == "<<<" and words[:1] == ["read"]:
                self._read_words(words[1:], value(target, self.variables))
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
            self.directed(texts[0], words[1:] if name == "sbatch" else ())
            self.text(texts[0], f"{self.where} (line {command.line})")
        elif name == "read" and words[-1:] and re.fullmatch(r"[A-Za-z_]\w*", words[-1]):
            self.variables[words[-1]] = texts[0].strip("\n")

    def _read_words(self, words: list[str], text: str) -> None:
        """``read -ra NAMES <<< text``: the pieces between ``IFS``, a list or a variable each."""
        flags = [word for word in words if word.startswith("-")]
        names = [word for word in words if not word.startswith("-")]
        between = text_of(self.variables.get("IFS", "")).strip() or None
        pieces = [piece.strip() for piece in text.split(between)]
        if UNKNOWN.search(text) or not all(re.fullmatch("-[ra]+", flag) for flag in flags):
            for name in names:
                self.variables.pop(name, None)
        elif names and any("a" in flag for flag in flags):
            self.variables[names[0]] = pieces
        elif names:
            last = (between or " ").join(pieces[len(names) - 1 :])
            self.variables |= dict(zip(names, [*pieces[: len(names) - 1], last], strict=False))

    def _edited(self, command: grammar.Command, words: list[str]) -> None:
        """``sed s/A/B/ TEMPLATE | sed ... > FILE``: a file made of one that was given, where words are exchanged."""
        edits = [match for match in map(_EDIT.fullmatch, words) if match]
        names = [word.rsplit("/", 1)[-1] for word in words if not (_EDIT.fullmatch(word) or word.startswith("-"))]
        text = self.others.get(names[0]) if names else self.piped
        targets = [value(target, self.variables) for mark, target, *_ in command.files if mark == ">"]
        self.piped = None
        if text is None or len(names) > 1 or len(edits) + len(names) < len(words):
            for name in names if edits else []:
                self.note(command.line, f"makes a file of {short(name)}, which was not given")
            return
        self.made.read.update(names)
        for _, old, new, every in (match.groups() for match in edits):
            text = "\n".join(line.replace(old, new, -1 if every else 1) for line in text.split("\n"))
            if len(text) > LONGEST:
                raise ScenarioError(
                    f"{self.where}: line {command.line} makes a text of more than {LONGEST:,} characters"
                )
        if targets:
            self.made.written[targets[0].rsplit("/", 1)[-1]] = text
        else:
            self.piped = text

    def _launched(self, command: grammar.Command, words: list[str]) -> None:
        """A command that may launch training, or a shell with the line or the script that it is given."""
        words = primus_commands.spelt_out(words, self.variables, self.others) or words
        if self._handed_on(command, words):
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

    def _handed_on(self, command: grammar.Command, words: list[str]) -> bool:
        """Follow the line or the script that a shell, ``sbatch --wrap``, ``ssh`` or a launcher is given; whether it is
        given one."""
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
            return True
        wrapped = next((i for i, word in enumerate(words) if word.startswith("--wrap")), None)
        if words[0] == "sbatch" and wrapped is not None:
            inside = words[wrapped].partition("=")[2] or " ".join(words[wrapped + 1 : wrapped + 2])
            self.directed("", words[1:wrapped])
            self._within(inside, command.line, [])
            return True
        if words[0] in ELSEWHERE and (quoted := [word for word in words if " " in word]):
            self._within(quoted[-1], command.line, [])
            return True
        scripts = [word for word in words if word.endswith(SCRIPTS) and not word.startswith("-")]
        if scripts and (words[0] in {"srun", "sbatch", "mpirun", "mpiexec"} or words[0] == scripts[0]):
            at = words.index(scripts[0])
            around = self.before
            self.before = [*around, *words[:at]]
            self._script(scripts[0], command.line, words[at + 1 :], words[1:at] if words[0] == "sbatch" else ())
            self.before = around
            return True
        return False

    def _within(self, text: str, line: int, arguments: list[str]) -> None:
        """The line that a shell is given."""
        held = dict(self.variables)
        if arguments:
            self._positions(arguments[1:])
        self.text(text, f"{self.where} (line {line})")
        self.variables = held

    def _script(self, path: str, line: int, arguments: list[str], submitted: Sequence[str] = ()) -> None:
        """Another script that is run; ``submitted`` are the words of ``sbatch`` before its name."""
        name = path.rsplit("/", 1)[-1]
        own = self.made.written.get(name)  # from lines of its own, before
        if own is not None and name not in self.others:
            self.directed(own, submitted)
            self._within(own, line, [name, *arguments])
            return
        if name not in self.others:
            if name.endswith(SCRIPTS):
                self.missing.append(short(path))
                self.note(line, f"runs {short(path)}, which was not given")
            return
        held = dict(self.variables)
        self.made.read.add(name)
        self._positions(arguments)
        self.directed(self.others[name], submitted)
        self.text(self.others[name], name)
        self.variables = held


def _parts(words: list[str]) -> list[str]:
    """Words with those apart that hold several options."""
    return [part for word in words for part in (word.split() if word.strip().startswith("--") else [word])]


def fields_of_line(line: str) -> list[str]:
    """Words of a line without variables."""
    return [one for token in tokens(line, "a line") if token.kind == "word" for one in fields(token.text, {})]
