"""nanoGPT's runs: what ``train.py`` makes of a file of ``config/`` and of ``--name=value`` behind it.

Names and defaults: karpathy/nanoGPT ``train.py``, ``configurator.py`` and ``model.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.nanogpt_values import ENOUGH, TELLING
from clustersim.files.launch.table import FrameworkTable

PROGRAM = "train.py"
BATCH = 12
PASSES = 40
"""Samples of a pass, and passes of a step over all ranks, where nothing is said."""
PADDED = 50304
"""GPT-2's vocabulary as ``train.py`` rounds it up, where the data set has no ``meta.pkl`` of its own."""
CHARACTERS = {"shakespeare_char": 65}
"""Vocabularies of nanoGPT's data sets by characters (``data/shakespeare_char/prepare.py``)."""
WORDS = ("openwebtext", "shakespeare")
"""Its data sets in GPT-2's tokens."""
TRAINERS = {"per_device_train_batch_size", "model_name_or_path", "num_train_epochs", "output_dir"}
"""Names of Hugging Face's Trainer, which has a block_size and gradient_accumulation_steps too."""
OF_GPT2 = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
"""n_layer, n_head and n_embd of its checkpoints, which count, and not the file's (``GPT.from_pretrained``)."""
GPT2_TOKENS = 50257


def is_launch(document: Document) -> bool:
    """Whether a command runs ``train.py`` with nanoGPT's own words."""
    names = {name for at, name in document.options if at == "args"}
    named = document.options.get(("args", "config"))
    has_file = named is not None and str(named.value).endswith(".py")
    own = len(names & set(TELLING)) >= ENOUGH and not names & TRAINERS
    return document.program.endswith(PROGRAM) and (has_file or own)


def arranged(read: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Say what ``train.py`` makes of several options together. Changes ``options``; returns notes.

    Raises :class:`ScenarioError` for a file that was not given, and for a model or a batch that is none.
    """
    if table.name != "nanogpt":
        return []
    named = options.pop(("args", "config"), None)
    if named is not None and all(file.kind == "shell" for file in read):
        raise ScenarioError(f"{named.where}: {PROGRAM} reads {named.value}; give that file too")
    for at, name in [key for key in options if key[0] == "args"]:
        options["config", name] = options.pop((at, name))  # which configurator.py reads behind the file
    where = read[0].name
    _samples(options, where)
    _ranks(read, options)
    return [*_pretrained(options), *_vocabulary(options, where)]


def _samples(options: dict[Key, OptionValue], where: str) -> None:
    """Samples of a step: passes are said of all ranks together, which ``train.py`` divides by their number."""
    numbers = []
    for name, usual in (("batch_size", BATCH), ("gradient_accumulation_steps", PASSES)):
        option = options.get(("config", name), OptionValue(name, usual, where))
        text = str(option.value)
        if not text.isdecimal() or not 0 < int(text[:9]) == int(text):
            raise ScenarioError(
                f"{option.where}: {option.as_written} does not fit: expected a whole number of at least 1"
            )
        numbers.append((option, int(text)))
    (size, batch), (passes, count) = numbers
    words = f"{passes.name} {count} of {size.name} {batch}, in all"
    options["config", "nanogpt.samples"] = OptionValue(words, batch * count, passes.where)


def _ranks(read: Sequence[Document], options: dict[Key, OptionValue]) -> None:
    """One GPU where no launcher starts ``train.py``, which asks for RANK."""
    for file in read:
        if file.started_by.startswith("python") and file.program.endswith(PROGRAM) and not file.machine:
            options["config", "nanogpt.kind"] = OptionValue("python", "single", file.name)
            file.notes.append(f"{file.name}: no launcher starts {file.program}: one GPU")


def _pretrained(options: dict[Key, OptionValue]) -> list[str]:
    """The sizes of a checkpoint of GPT-2; returns a note on those that count no more.

    Raises :class:`ScenarioError` for a checkpoint that nanoGPT does not know.
    """
    start = options.get(("config", "init_from"))
    if start is None or str(start.value) in {"scratch", "resume"}:
        return []
    sizes = OF_GPT2.get(str(start.value))
    if sizes is None:
        raise ScenarioError(f"{start.where}: {start.as_written} is none of scratch, {', '.join(OF_GPT2)}")
    own = dict(zip(("n_layer", "n_head", "n_embd"), sizes, strict=True)) | {"bias": True, "nanogpt.vocab": GPT2_TOKENS}
    dropped = [options[key].name for name in own if (key := ("config", name)) in options]
    for name, value in own.items():
        options["config", name] = OptionValue(start.name, value, start.where)
    return [f"{start.where}: {start.as_written} has its own {', '.join(dropped)}"] if dropped else []


def _vocabulary(options: dict[Key, OptionValue], where: str) -> list[str]:
    """Tokens of the vocabulary, by the data set; returns a note where it is not one of nanoGPT's."""
    data = options.get(("config", "dataset"), OptionValue("dataset", WORDS[0], where))
    tokens = CHARACTERS.get(str(data.value), PADDED)
    if ("config", "nanogpt.vocab") in options:
        return []
    options["config", "nanogpt.vocab"] = OptionValue(data.name, tokens, data.where)
    if str(data.value) in (*CHARACTERS, *WORDS):
        return []
    return [
        f"{data.where}: {data.name} {shown(data.value)} is none of nanoGPT's: {tokens:,} tokens, as where it has no "
        "meta.pkl with a vocabulary of its own"
    ]
