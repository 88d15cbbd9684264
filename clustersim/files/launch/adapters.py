"""Adapters as people's files ask for them: TRL's arguments, axolotl's, LLaMA-Factory's and PEFT's own file.

Names and defaults: huggingface/trl ``trl/trainer/model_config.py`` and PEFT's ``LoraConfig``; axolotl
``src/axolotl/utils/schemas/peft.py``; LLaMA-Factory ``src/llamafactory/hparams/finetuning_args.py`` and
``model_args.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from clustersim.core.errors import ClusterSimError, ModelError, ScenarioError
from clustersim.core.texts import data_table, shown
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.options import ScenarioFields
from clustersim.model.adapter_setting import ALL_LINEAR, UnknownTarget, compiled, is_pattern
from clustersim.scenario import Scenario
from clustersim.scenario.file.reading import Table as Tables

Options = Mapping[Key, OptionValue]
WORD = re.compile(r"[A-Za-z_][\w.-]*")
TYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32", "fp32": "fp32"}


class AdapterWords(msgspec.Struct, frozen=True):
    """How one library asks for adapters: a row of ``data/adapters.toml``, which says what each field is."""

    option: str
    values: tuple[str, ...]
    rank: str
    targets: str
    saved: str
    packed: tuple[str, ...]
    double: str
    usual_rank: int | None = None
    usual_targets: tuple[str, ...] | None = None
    usual_dropout: float = 0.0
    usual_double: bool = False


LIBRARIES = msgspec.convert(data_table("adapters")["library"], list[AdapterWords])
NAMED = re.compile(r"(-unsloth)?-bnb-4bit$")
"""The ending of a model's name on the hub whose weights are saved in bitsandbytes' 4 bits, and loaded so."""
IDLE = frozenset(data_table("adapters")["idle"])
"""What says nothing more of a step, or is read with the adapters."""


def passed_over(tables: Tables, notes: list[str], check: Callable[[], Scenario]) -> Scenario:
    """The scenario that a check makes of ``tables``, without targets that name no linear of the model where others do,
    as PEFT has it (peft/tuners/tuners_utils.py ``inject_adapter``); ``notes`` get a sentence for each."""
    while True:
        try:
            return check()
        except ClusterSimError as wrong:
            unknown = _unknown_target(wrong)
            adapter = tables.get("model", {}).get("adapter", {})
            left = [target for target in adapter.get("target_modules", ()) if target != unknown]
            if unknown is None or not left:
                raise
            tables["model"]["adapter"] = adapter | {"target_modules": left}
            notes.append(f"adapters: {shown(unknown)} names no linear of the model, and is passed over, as PEFT does")


_TELLS = re.compile(r"(?<![a-z])(q?lora|peft)(?![a-z])")
_ASKS = frozenset((*(row.option for row in LIBRARIES), "use_lora", "lora", "peft", "stage"))
"""Options of which one says whether there are adapters; the last is LLaMA-Factory's, whose own says so."""


def refuse_untold(read: Sequence[Document], options: Options) -> None:
    """Raise :class:`ScenarioError` for a script whose own name, or whose output's, tells of adapters that no
    option asks for: all parameters would be played as trained."""
    if _ASKS & {name for _, name in options}:
        return
    for file in read:
        if file.kind != "shell" or re.search("swift|llamafactory|axolotl", file.program):
            continue
        output = file.options.get(("args", "output_dir"))
        for words in (file.program, "" if output is None else str(output.value)):
            name = words.rstrip("/").rsplit("/", 1)[-1]
            told = _TELLS.search(name.lower())
            if told is not None:
                raise ScenarioError(
                    f"{file.name}: {name} tells of {told[0]}, and no word that is known asks for adapters; say "
                    "use_peft, lora_r and lora_target_modules, or use_peft false where all parameters are trained"
                )


def _unknown_target(wrong: BaseException | None) -> str | None:
    while wrong is not None and not isinstance(wrong, UnknownTarget):
        wrong = wrong.__context__
    return wrong.target if wrong is not None else None


def taken(options: Options, fields: ScenarioFields, used: set[Key]) -> list[str]:
    """Put what options say of adapters into ``model.adapter``, and what was read into ``used``; returns notes.

    Raises :class:`ScenarioError` for a target that is a pattern, weights in 4 bits without an adapter, a rank or
    targets that nobody says, and biases that are trained.
    """
    read = {name: (key, option) for key, option in options.items() for name in [key[1]]}
    words = next((row for row in LIBRARIES if _is_on(row, read)), None)
    if words is None:
        _refuse_packed(read)
        return []
    asked = _Asked(words, read, fields, used)
    used.update(key for name, (key, _) in read.items() if name in IDLE)
    notes = asked.targets()
    asked.rank()
    asked.rest()
    notes += asked.named()
    if "bias" in read and str(read["bias"][1].value).lower() != "none":
        option = read["bias"][1]
        raise ScenarioError(f"{option.where}: bias {shown(option.value)}: biases that are trained are not played")
    return notes


def _is_on(row: AdapterWords, read: Mapping[str, tuple[Key, OptionValue]]) -> bool:
    if row.option not in read:
        return False
    value = read[row.option][1].value
    alone = value == []  # a flag of a script without a value
    return str(value).lower() in row.values or (alone and "true" in row.values)


def _refuse_packed(read: Mapping[str, tuple[Key, OptionValue]]) -> None:
    """Raise for weights in 4 bits that nothing is trained beside, and for a command with a rank of no adapters."""
    asked = {"true", "1", "yes", "[]"}
    for name, values in (
        ("load_in_4bit", asked),
        ("use_4bit_quantization", asked),
        ("quantization_bit", {"4"}),
        ("quant_bits", {"4"}),
    ):
        if name in read and str(read[name][1].value).lower() in values:
            option = read[name][1]
            raise ScenarioError(
                f"{option.where}: {option.name} without an adapter: weights in 4 bits are not trained; say use_peft, "
                "adapter or finetuning_type too"
            )
    model = read["model_name_or_path"][1] if "model_name_or_path" in read else None
    if model is not None and NAMED.search(str(model.value)):
        raise ScenarioError(
            f"{model.where}: {model.name} {shown(model.value)} without an adapter: weights in 4 bits are not trained; "
            "say use_peft, adapter or finetuning_type too"
        )
    for name in ("lora_r", "lora_rank"):
        rank = read[name][1] if name in read else None
        if rank is not None and rank.name.startswith("--"):
            raise ScenarioError(
                f"{rank.where}: {rank.name} {shown(rank.value)}, and no word that is known asks for adapters; "
                "say use_peft true, or leave it out where all parameters are trained"
            )


class _Asked(msgspec.Struct):
    """What one library's options ask for."""

    words: AdapterWords
    read: Mapping[str, tuple[Key, OptionValue]]
    fields: ScenarioFields
    used: set[Key]

    def _say(self, field: str, name: str, value: Any) -> None:
        key, option = self.read[name]
        self.used.add(key)
        self.fields.say(f"model.adapter.{field}", value, option)

    def targets(self) -> list[str]:
        """Which linears; returns a note where the library's own are taken."""
        words: list[str] = []
        name = self.words.targets
        self.used.add(self.read[self.words.option][0])
        if name in self.read:
            words += _modules(self.read[name][1])
        if "lora_target_linear" in self.read and flag(self.read["lora_target_linear"][1]):
            name, words = (name if words else "lora_target_linear"), [ALL_LINEAR, *words]
        if "lora_target_linear" in self.read:
            self.used.add(self.read["lora_target_linear"][0])
        if words:
            plain = [ALL_LINEAR if word in {"all", "all-linear", "all_linear"} else word for word in words]
            self._say("target_modules", name, list(dict.fromkeys(plain)))
            return []
        usual = self.words.usual_targets
        if usual is None:
            raise self._missing("lora_target_modules or lora_target_linear", "which linears have an adapter")
        self.fields["model.adapter.target_modules"] = list(usual)
        return [f"adapters: no {self.words.targets}; {' and '.join(usual)} have one, as the library takes them"]

    def rank(self) -> None:
        """Of their products."""
        usual = self.words.usual_rank
        if self.words.rank in self.read:
            self._say("rank", self.words.rank, number(self.read[self.words.rank][1], whole=True))
        elif usual is None:
            raise self._missing(self.words.rank, "of what rank they are")
        else:
            self.fields["model.adapter.rank"] = usual

    def rest(self) -> None:
        """Dropout, modules that are trained whole, and the frozen weights' types."""
        if "lora_dropout" in self.read:
            self._say("dropout", "lora_dropout", float(number(self.read["lora_dropout"][1])))
        elif self.words.usual_dropout:
            self.fields["model.adapter.dropout"] = self.words.usual_dropout
        saved = self.words.saved
        if saved in self.read and (modules := _modules(self.read[saved][1])):
            self._say("modules_to_save", saved, modules)
        elif saved in self.read:
            self.used.add(self.read[saved][0])
        for name in ("torch_dtype", "dtype"):
            if name in self.read and (dtype := TYPES.get(str(self.read[name][1].value).rpartition(".")[2])):
                self._say("base_dtype", name, dtype)
        self._packed()

    def _packed(self) -> None:
        double = self.words.double
        for name in self.words.packed:
            if name not in self.read:
                continue
            option = self.read[name][1]
            counted = name in {"quantization_bit", "quant_bits"}
            four = str(option.value) == "4" if counted else flag(option)
            if counted and str(option.value) not in {"4", "None", "none"}:
                raise ScenarioError(
                    f"{option.where}: {option.name} {shown(option.value)}: 4 bits are played, no others"
                )
            self.used.add(self.read[name][0])
            if four:
                self._say("load_in_4bit", name, True)
                said = double in self.read
                both = flag(self.read[double][1]) if said else self.words.usual_double
                self.fields["model.adapter.bnb_4bit_use_double_quant"] = both
                self.used.update({self.read[double][0]} if said else ())
        method = self.read.get("quantization_method") or self.read.get("quant_method")
        if method is not None:
            self.used.add(method[0])
            if str(method[1].value).lower() not in {"bnb", "bitsandbytes"}:
                where = method[1]
                raise ScenarioError(
                    f"{where.where}: {where.name} {shown(where.value)}: bitsandbytes' 4 bits are played"
                )

    def named(self) -> list[str]:
        """Weights that are saved in 4 bits, whatever else is said; returns a note."""
        option = self.read["model_name_or_path"][1] if "model_name_or_path" in self.read else None
        if option is None or not NAMED.search(str(option.value)):
            return []
        self.fields.say("model.adapter.load_in_4bit", True, option)
        self.fields["model.adapter.bnb_4bit_use_double_quant"] = True
        return [f"{option.value} is in bitsandbytes' 4 bits, with scales in 8; all of its linears are taken to be"]

    def _missing(self, names: str, what: str) -> ScenarioError:
        option = self.read[self.words.option][1]
        return ScenarioError(f"{option.where}: {option.name} {shown(option.value)} without {names}: say {what}")


def _modules(option: OptionValue) -> list[str]:
    """Names of modules, or one pattern of whole names, as PEFT reads a text that is no list. Raises for what is
    neither."""
    value = option.value
    if value in (None, "", "null", "None"):
        return []
    if isinstance(value, str) and is_pattern(value) and not re.fullmatch(r"[\[\]\w.,'\"\s-]+", value):
        refuse_pattern(value, option)
        return [value]
    words = [str(word) for word in value] if isinstance(value, list | tuple) else re.split(r"[,\s]+", str(value))
    words = [word.strip().strip("\"'[]") for word in words]
    for word in filter(None, words):
        if not WORD.fullmatch(word):
            raise ScenarioError(f"{option.where}: {option.name} {shown(word)} is a pattern; list the modules it names")
    return [word for word in words if word]


def refuse_pattern(text: str, option: OptionValue) -> None:
    """Raises :class:`ScenarioError` for a pattern that none is."""
    try:
        compiled(text)
    except ModelError as wrong:
        raise ScenarioError(f"{option.where}: {option.name}: {wrong}") from None


def flag(option: OptionValue) -> bool:
    """Whether an option is true. Raises :class:`ScenarioError` for what is neither."""
    if option.is_on:
        return True
    value = str(option.value).lower()
    if value in {"false", "0", "no", "none", "null"}:
        return False
    raise ScenarioError(f"{option.where}: {option.name} {shown(option.value)} does not fit: expected true or false")


def number(option: OptionValue, *, whole: bool = False) -> Any:
    """An option's number. Raises :class:`ScenarioError` for none."""
    try:
        return int(str(option.value)) if whole else float(str(option.value))
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise ScenarioError(
            f"{option.where}: {option.name} {shown(option.value)} does not fit: expected {kind}"
        ) from None
