"""Whose launch files are, by content: by keys, by programs that a command runs, by who starts it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import short
from clustersim.files.launch import (
    automodel,
    colossal,
    cookbook,
    megatron_swift,
    nanogpt,
    openrlhf,
    prime_rl,
    primus,
    unread,
    verl,
)
from clustersim.files.launch.files import PYTHON, UNSET, Document, OptionValue
from clustersim.files.launch.table import NAMES, load

RECIPES = ("nanogpt", "verl", "torchtune", "lightning", "neox", "nanotron", "olmo", "foundry")
"""Frameworks whose one file holds a whole run, those with the most telling keys first."""


FACTORY_1 = frozenset(("dist_config.name", "kernel_config.name", "peft_config.name", "model_class"))
"""Keys of version 1 of LLaMA-Factory alone."""


LITGPT = (
    "train.lr_warmup_steps|train.micro_batch_size",
    "train.max_tokens|train.micro_batch_size",
    "train.micro_batch_size|checkpoint_dir",
)
"""Keys that together tell a configuration of LitGPT, any one group of them."""


OWN_COMMANDS: dict[str, Callable[[Document], bool]] = {
    "nanogpt": nanogpt.is_launch,
    "openrlhf": openrlhf.is_launch,
    "cookbook": cookbook.is_launch,
    "verl": verl.is_launch,
}
"""Frameworks whose commands tell themselves by their own words."""


OWN_FILES: dict[str, Callable[[Document], bool]] = {
    "primus": primus.is_launch,
    "colossal": colossal.is_launch,
    "automodel": automodel.is_launch,
    "prime-rl": prime_rl.is_launch,
}
"""Frameworks whose files and commands tell themselves before all others."""


SWIFT = ("sft.py", "pt.py", "swift.cli.sft", "swift.cli.pt", "llm_sft.py", "llm_pt.py")
"""What ms-swift's commands run, under torchrun or accelerate."""


SWIFT_MODULES = ("swift.cli.sft", "swift.cli.pt")
"""Those whose name alone tells that they are ms-swift's."""


SWIFT_TUNERS = ("tuner_type", "train_type", "sft_type")
"""Its option that says what is trained, the newest name first."""


def framework_of(read: Sequence[Document], framework: str | None = None) -> str:
    """Whose files these are, by content. Raises :class:`ScenarioError` where nothing or too much tells."""
    if framework is not None:
        return load(framework).name
    owners = {name for file in read for name in [_whose(file)] if name}
    for host in ("accelerate", "deepspeed"):  # which read each other's files, and Megatron's arguments
        if host in owners:
            return host
    if len(owners) == 1:
        return owners.pop()
    files = ", ".join(short(file.name) for file in read)
    one_file = len(read) == 1
    nobody = "holds no option that tells whose it is" if one_file else "hold no option that tells whose they are"
    problem = f"{'is' if one_file else 'are'} of {' and '.join(sorted(owners))}" if owners else nobody
    unset = [note.partition(": ")[2] for file in read for note in file.notes if UNSET in note]
    named = [f"{naming.name} names {naming.value}; give that file too" for naming in _named(read) if not owners]
    problem = "; ".join([problem, *named, *unset])
    raise ScenarioError(f"{files}: {problem}; say --from {'|'.join(NAMES)}")


LIGHTNING = re.compile(
    r"auto|ddp|dp$|fsdp|deepspeed|single_device|horovod|xla|tpu_spawn|colossalai|bagua|hivemind|model_parallel"
)
"""How names of Lightning's strategies begin, those of its earlier releases too."""
_TITAN = ("job.config_file", "job.config-file")
"""torchtitan's option that names its TOML."""


def _named(read: Sequence[Document]) -> list[OptionValue]:
    """Configurations that commands name and that were not given: by Hydra's ``--config-name``, or a file's name."""
    given = {Path(file.name).name for file in read}
    keys = ("config_name", "config", "config_file", "config_path", "train_config", "conf_file")
    naming = [file.options["args", key] for file in read for key in keys if ("args", key) in file.options]
    naming += [one for file in read for key in _TITAN if (one := file.overrides.get(("config", key))) is not None]
    return [
        option
        for option in naming
        if option.name == "--config-name"
        or (re.search(r"\.(ya?ml|json|toml)$", str(option.value)) and Path(str(option.value)).name not in given)
    ]


def _whose(file: Document) -> str | None:
    names = [name for _, name in (*file.options, *file.overrides)]
    values = {name: option.value for options in (file.options, file.overrides) for (_, name), option in options.items()}
    for name, is_launch in OWN_FILES.items():
        if is_launch(file):
            return name
    other = unread.of_file(file.program, values)
    if other is not None:
        raise ScenarioError(f"{file.name}: {other.refusal}")
    if file.kind in {"yaml", "json"}:
        own = _of_recipe(file, names)
        if own is not None:
            return own
    launcher = str(file.options[key].value) if (key := ("args", "launcher")) in file.options else ""
    if file.program.startswith("torchtitan") or file.kind == PYTHON:
        return "torchtitan"
    if launcher.startswith(("accelerate", "trl", "llamafactory-cli", "axolotl", "swift")):
        return "accelerate"
    if file.program in SWIFT_MODULES or (
        file.program in SWIFT and any(("args", name) in file.options for name in SWIFT_TUNERS)
    ):
        return "accelerate"
    if megatron_swift.is_launch(file):
        return "megatron"
    if file.program.startswith("litgpt "):
        return "litgpt"
    for name, is_launch in OWN_COMMANDS.items():
        if is_launch(file):
            return name
    if launcher == "torchrun" and file.program.startswith("tune "):
        return "torchtune"
    return _by_marks(file, names) or ("deepspeed" if launcher.startswith("deepspeed") else None)


def _by_marks(file: Document, names: Sequence[str]) -> str | None:
    """The framework that an option's name is a mark of."""
    for name in ("accelerate", "nemo", "deepspeed", "torchtitan", "megatron"):
        globs = load(name).marks
        if (file.kind == "toml") == (name == "torchtitan") and any(
            fnmatchcase(option, glob)
            or fnmatchcase(option, f"{glob}.*")
            or (name == "megatron" and option.rsplit(".", 1)[-1] == glob)
            for option in names
            for glob in globs
        ):
            return name
    return None


def _of_recipe(file: Document, names: Sequence[str]) -> str | None:
    """Of a configuration that holds a whole run."""
    if FACTORY_1 & set(names):
        return "accelerate"
    if unread.has_group(names, LITGPT):
        return "litgpt"
    strategy = file.options.get(("config", "trainer.strategy"))
    plain = strategy is not None and LIGHTNING.match(str(strategy.value))
    if plain:
        return "lightning"
    for name in RECIPES:
        globs = load(name).marks
        if any(fnmatchcase(option.replace("-", "_"), glob) for option in names for glob in globs):
            return name
    return None
