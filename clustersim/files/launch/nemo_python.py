"""Programs that take a recipe of NeMo 2 and change it, read as ``--to-yaml`` of NeMo-Run would write them.

``llm.llama3_70b.pretrain_recipe(num_nodes=4)`` names a configuration of nemo_toolkit, and what the program sets of it
counts against that. The program is read as a tree and never run: what only running tells is asked for.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.texts import short
from clustersim.files.launch.nemo_recipes import NemoRecipe, dropped, recipes
from clustersim.files.launch.python_values import UNREAD, CalledClass, ProgramScope, ProgramValues, last_name

ASKED = "give the configuration that it makes (--to-yaml of NeMo-Run)"
PACKAGE = "nemo.collections"
RECIPES = "nemo.collections.llm.recipes."
UNCHANGING = ("run", "add", "dryrun", "print", "pprint", "len", "str", "repr", "isinstance")
"""Functions that take a recipe and leave it as it is: those of NeMo-Run, and Python's own."""
_LEFT = (
    "log*",
    "resume*",
    "tokenizer*",
    "*.tokenizer*",
    "data.paths*",
    "data.num_*",
    "data.*_dir",
    "data.split*",
    "data.*kwargs",
    "trainer.max_*",
    "trainer.val_*",
    "trainer.limit_*",
    "trainer.log*",
    "trainer.enable_*",
    "trainer.strategy.ckpt_*",
    "optim.lr_scheduler*",
    "optim.config.*lr*",
    "optim.config.*beta*",
    "optim.config.weight_decay",
)
"""What of a recipe changes neither time nor memory of a step, and may be whatever it is (globs)."""
_QUIET = ("Timing", "GarbageCollection", "Nsys", "Checkpoint", "LearningRateMonitor", "Profil", "EarlyStop")
"""Callbacks that change no step of a healthy run, by a part of their names."""
_DDP = ("overlap_grad_reduce", "overlap_param_gather", "bucket_size", "align_param_gather")
"""Arguments of ``MegatronCommOverlapCallback`` that become fields of the strategy's ``ddp``."""
_OVERRULED = "trainer.strategy.ddp.grad_reduce_in_fp32"
"""What the precision plugin says instead (``update_config_with_dtype_overrides`` of its mixed_precision.py)."""
_PARTS = ("trainer", "model", "data", "optim", "peft")
"""Of a recipe."""
_PRECISIONS = {"bf16-mixed": "bf16_mixed", "16-mixed": "fp16_mixed"}
_ARGUMENTS = {
    "tensor_parallelism": "trainer.strategy.tensor_model_parallel_size",
    "pipeline_parallelism": "trainer.strategy.pipeline_model_parallel_size",
    "virtual_pipeline_parallelism": "trainer.strategy.virtual_pipeline_model_parallel_size",
    "context_parallelism": "trainer.strategy.context_parallel_size",
    "expert_parallelism": "trainer.strategy.expert_model_parallel_size",
    "sequence_parallelism": "trainer.strategy.sequence_parallel",
    "global_batch_size": "data.global_batch_size",
    "micro_batch_size": "data.micro_batch_size",
    "seq_length": "data.seq_length",
}
"""Arguments of recipes whose degrees and batch are open."""
_PACKED_SAMPLES = 8
"""Of a step of ``finetune_recipe`` where it packs sequences (finetune_default.py of nemo_toolkit 2.5.0)."""
_KINDS = ("pretrain_recipe", "finetune_recipe")
_TUNING = ("peft_scheme", "seq_length", "packed_sequence")
"""Arguments of ``finetune_recipe`` alone."""
_USUAL = ("num_nodes", "num_gpus_per_node")
_IDLE = ("dir", "name", "fn", "max_steps", "callbacks", "pipeline_parallelism_type", "gradient_clip_val")
_IDLE_ENDS = ("_lr", "_steps", "_batches", "_interval")


def is_program(tree: ast.Module) -> bool:
    """Whether a program imports NeMo's collections and calls for a recipe of pre-training."""
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return any(name.startswith(PACKAGE) for name in modules) and bool(_calls(tree))


def options(tree: ast.Module, name: str) -> tuple[dict[str, Any], list[str]]:
    """Options as NeMo's YAML has them, and notes. Raises :class:`ScenarioError` for what only running tells."""
    calls = _calls(tree)
    if len(calls) > 1:
        lines = ", ".join(str(call.lineno) for call, _ in calls)
        raise ScenarioError(f"{name}: takes several recipes (lines {lines}), and only running tells which; {ASKED}")
    call, module = calls[0]
    rows = recipes()
    if module not in rows:
        raise ScenarioError(
            f"{name} (line {call.lineno}): the recipe {module} is in no table here; {nearest(module, rows)}; {ASKED}"
        )
    kind = last_name(call.func) if isinstance(call.func, ast.Attribute) else _imported(tree)[last_name(call.func)][1]
    is_tuning = kind == _KINDS[1]
    recipe = rows[module].of_tuning() if is_tuning else rows[module]
    if recipe is None:
        raise ScenarioError(f"{name} (line {call.lineno}): {kind} of {module} is in no table here; {ASKED}")
    reading = _Reading(ProgramValues(tree), name, recipe, is_tuning=is_tuning)
    reading.taken(call)
    release = "2.5.0" if is_tuning else "2.4.0"
    note = f"{name}: {module}.{kind} as nemo_toolkit {release} has it, with what the program sets of it"
    return reading.options, [note, *reading.notes]


def _calls(tree: ast.Module) -> list[tuple[ast.Call, str]]:
    """Calls for a recipe, each with the module that it is of."""
    imported = _imported(tree)
    met: list[tuple[ast.Call, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in _KINDS:
            met.append((node, last_name(node.func.value)))
        elif isinstance(node.func, ast.Name) and node.func.id in imported:
            met.append((node, imported[node.func.id][0]))
    return met


def _imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """The module and the kind of each recipe that is imported by a name."""
    return {
        alias.asname or alias.name: ((node.module or "").removeprefix(RECIPES), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(RECIPES)
        for alias in node.names
        if alias.name in _KINDS
    }


class _Reading:
    """A program's recipe, and what is set of it, statement by statement."""

    def __init__(self, values: ProgramValues, name: str, recipe: NemoRecipe, *, is_tuning: bool = False) -> None:
        self.values = values
        self.name = name
        self.recipe = recipe
        self.is_tuning = is_tuning
        self.options = recipe.options()
        self.notes: list[str] = []
        self.followed: set[int] = set()

    def taken(self, call: ast.Call) -> None:
        """Read the call, then every function that has the recipe by a name of its own."""
        scope = self.values.scope_of(call)
        tuning = [word for word in call.keywords if self.is_tuning and word.arg in _TUNING]
        for word in call.keywords:
            if word not in tuning:
                self._argument(word, scope)
        if self.is_tuning:
            self._tuned(call, {word.arg: self.values.of(word.value, scope) for word in tuning})
        if call.args:
            self._refuse(call, "is given arguments without names")
        for holder, names in self.values.holders(call):
            self._statements(holder.node.body, holder, names, straight=True)
        self._unfollowed()

    def _tuned(self, call: ast.Call, given: Mapping[str | None, Any]) -> None:
        """What only ``finetune_recipe`` is given: whether it trains adapters, and how long sequences are."""
        for name, value in given.items():
            if value is UNREAD:
                self._refuse(call, f"is given {name}, which only running tells: write its value")
        scheme = given.get("peft_scheme", "lora")
        if scheme is not None and str(scheme).lower() != "none":
            usual = "" if "peft_scheme" in given else ", as finetune_recipe does by default"
            self._refuse(call, f"trains an adapter ({scheme}){usual}, which is read of YAML files, not of programs")
        length = given.get("seq_length")
        if given.get("packed_sequence"):
            if length is None and not self.recipe.open:
                self._refuse(call, "packs sequences, and does not say seq_length")
            self.options["data.global_batch_size"] = _PACKED_SAMPLES
            self.notes.append(f"{self.name}: sequences are packed, and attention sees one document in each")
        else:
            self.notes.append(f"{self.name}: every sample has the longest sequence, which packed_sequence would fill")
        if length is not None:
            self.options["data.seq_length"] = length

    def _unfollowed(self) -> None:
        """Refuse what is set of a recipe by a name that was not followed: in a class, in a loop, by a second name."""
        for node in ast.walk(self.values.tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else []:
                path = ast.unparse(target).partition(".")[2] if isinstance(target, ast.Attribute) else ""
                part = path.partition(".")
                if id(node) not in self.followed and part[0] in _PARTS and part[1] and not _left(path):
                    self._refuse(node, f"sets {short(ast.unparse(node))}, which is not followed")

    def _argument(self, word: ast.keyword, scope: ProgramScope) -> None:
        name = word.arg or "**"
        if name in _IDLE or name.endswith(_IDLE_ENDS):
            return
        value = self.values.of(word.value, scope)
        if name == "performance_mode" and value in (True, False):
            self._quickened(word.value, asked=value)
            return
        if name in _USUAL:
            self._set("trainer.num_nodes" if name == "num_nodes" else "trainer.devices", value, word.value)
        elif self.is_tuning and name in {"resume_path", "tokenizer"}:
            return
        elif self.recipe.open and not self.is_tuning and name in _ARGUMENTS:
            self._set(_ARGUMENTS[name], value, word.value)
        elif self.recipe.open and name == "precision" and value in _PRECISIONS:
            self._set("trainer.plugins", CalledClass(_PRECISIONS[value]), word.value)
        else:
            self._refuse(word.value, f"is given {name}, which the table of NeMo's recipes does not have")

    def _quickened(self, node: ast.AST, *, asked: bool) -> None:
        """Put what ``performance_mode`` sets into the options."""
        if asked and self.recipe.fast is None:
            self._refuse(node, "is given performance_mode, which the table does not have of this recipe")
        if asked and self.recipe.fast is not None:
            fast = self.recipe.fast if self.recipe.pp > 1 else msgspec.structs.replace(self.recipe.fast, deferred=None)
            self.options |= fast.options()  # without stages nothing waits

    def _statements(self, body: list[ast.stmt], scope: ProgramScope, names: set[str], *, straight: bool) -> None:
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
                continue
            if isinstance(statement, ast.If | ast.For | ast.While | ast.Try | ast.With):
                main = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
                same = straight and (main or isinstance(statement, ast.With | ast.Try))
                for inner in ("body", "orelse", "finalbody"):
                    self._statements(getattr(statement, inner, []), scope, names, straight=same)
                continue
            self._handed(statement, names)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
                self._assigned(statement, scope, names, straight)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._called(statement.value, scope, names)

    def _assigned(self, statement: ast.Assign, scope: ProgramScope, names: set[str], straight: bool) -> None:
        root, _, path = ast.unparse(statement.targets[0]).partition(".")
        if root not in names or _left(path) or len(statement.targets) > 1:
            return
        self.followed.add(id(statement))
        if not straight:
            self._refuse(statement, f"sets {short(ast.unparse(statement))} where only running tells whether")
        if not all(part.isidentifier() for part in path.split(".")):
            self._refuse(statement, f"sets {short(ast.unparse(statement))}, which is not read")
        self._set(path, self.values.of(statement.value, scope), statement.value)

    def _called(self, call: ast.Call, scope: ProgramScope, names: set[str]) -> None:
        """``recipe.trainer.callbacks.append(...)``; other methods of a recipe's parts may change it."""
        root, _, path = ast.unparse(call.func).partition(".")
        if root not in names or _left(path):
            return
        if path not in {"trainer.callbacks.append", "trainer.callbacks.extend"} or len(call.args) != 1:
            self._refuse(call, f"calls {short(ast.unparse(call))}, which may change the recipe")
        self._callbacks(self.values.of(call.args[0], scope))

    def _callbacks(self, value: Any) -> None:
        for item in value if isinstance(value, list) else [value]:
            kind = item.kind if isinstance(item, CalledClass) else ""
            if kind == "MegatronCommOverlapCallback":
                for name, setting in item.given.items():
                    place = "trainer.strategy.ddp" if name in _DDP else "trainer.callbacks"
                    if isinstance(setting, bool | int):
                        self.options[f"{place}.{name}"] = setting
            elif kind == "MegatronTokenDropCallback" and all(
                isinstance(v, bool | int | float) for v in item.given.values()
            ):
                self.options |= dropped(item.given)
            elif not any(part in kind for part in _QUIET):
                self.notes.append(f"{self.name}: the callback {kind or 'that is not written out'} is left out")

    def _handed(self, statement: ast.stmt, names: set[str]) -> None:
        """Refuse a function that is handed the recipe, or a part of it, and may change it; a second name for one."""
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name | ast.Attribute):
            root, _, path = ast.unparse(statement.value).partition(".")
            if root in names and not _left(path) and isinstance(statement.targets[0], ast.Name):
                self._refuse(statement, f"has a second name for {short(ast.unparse(statement.value))}")
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and last_name(node.func) not in UNCHANGING:
                given = [*node.args, *(word.value for word in node.keywords)]
                handed = [
                    ast.unparse(item).partition(".") for item in given if isinstance(item, ast.Name | ast.Attribute)
                ]
                changing = (root in names and path not in self.options and not _left(path) for root, _, path in handed)
                if any(changing):
                    self._refuse(node, f"hands the recipe to {last_name(node.func)}, which may change it")

    def _set(self, path: str, value: Any, node: ast.AST) -> None:
        """Put a value at a path, where a class with its arguments takes the place of what was there."""
        if _left(path) or path == _OVERRULED:
            return
        if path == "trainer.callbacks":
            self._callbacks(value)
            return
        if value is UNREAD:
            self._refuse(node, f"{path} is {short(ast.unparse(node))}, which only running tells: write its value")
        changing = isinstance(value, CalledClass) or value is None
        for name in [name for name in self.options if name == path or (changing and name.startswith(f"{path}."))]:
            del self.options[name]
        if isinstance(value, CalledClass):
            self._class(path, value, node)
        elif value is not None:
            self.options[path] = value

    def _class(self, path: str, value: CalledClass, node: ast.AST) -> None:
        if path == "trainer.plugins":
            self.options.pop("mixed_precision", None)
            if value.kind.endswith("_mixed") and not value.given:
                self.options["mixed_precision"] = value.kind
                self.options[f"{path}.grad_reduce_in_fp32"] = not value.kind.startswith("fp16")
                return
        self.options[f"{path}._target_"] = f"nemo.{value.kind}"
        given = dict(value.given)
        if path == "model" and value.places:
            given["config"] = value.places[0]
        for name, setting in given.items():
            self._set(f"{path}.{name}", setting, node)

    def _refuse(self, node: ast.AST, problem: str) -> None:
        raise ScenarioError(f"{self.name} (line {getattr(node, 'lineno', 0)}): {problem}; or {ASKED}")


def _left(path: str) -> bool:
    return any(fnmatchcase(path, glob) for glob in _LEFT)
