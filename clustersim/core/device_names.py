"""Which GPU a text means: tables, logs and people write names with boards, makers and memory around them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clustersim.core.device import Device, by_name, devices
from clustersim.core.errors import TopologyError, nearest

_BOARD = re.compile(r"sxm\d?|pcie?|hbm\de?|nvidia|tesla|geforce|amd|instinct|quadro|generation|lambdacloud")
_JOINED = re.compile(
    r"(rtx)[\s-]*(pro)[\s-]*(6000)|(gtx)[\s-]*(titan)[\s-]*(x)\b|(titan)[\s-]*(x)[\s-]*\(?(pascal)|(titan)[\s-]*(rtx|xp|x|v)\b"
    r"|(rtx)[\s-]*(6000)[\s-]*(turing)|(rtx)[\s-]*([56]000)[\s-]+(ada)"
    r"|([gr]tx)[\s-]*(a?\d{4})(?:[\s-]*(ti)\b)?(?:[\s-]*(super)\b)?"
)


def device_from_text(text: str, *, pcie: bool | None = None) -> Device:
    """The device that a table or log means, whatever it adds: ``"V100-16GB-SXM2 (DGX-1)"``, ``"A100 80GB PCIe"``.

    The chip must be named; memory size and board (SXM, PCIe) narrow the choice and default to the first part listed.
    ``pcie`` chooses a PCIe (True) or SXM (False) board where the text does not say. Raises :class:`TopologyError` where
    no known chip is named.

    >>> device_from_text("LambdaCloud V100 16GB").name, device_from_text("A100-80").name
    ('V100-SXM2-16GB', 'A100-SXM4-80GB')
    """
    bare = re.sub(r"\(.*?\)|\[.*?\]", " ", text).strip()
    board = "pcie" if re.search(r"pci", text, re.I) else "sxm" if re.search(r"sxm|dgx|hgx", text, re.I) else ""
    for candidate in (text, bare):
        if (board or pcie is None) and candidate.strip().lower() in by_name():
            return by_name()[candidate.strip().lower()]
    parts = _parts(text)
    generation = re.search(r"sxm\d", text, re.I)
    board = board or {True: "pcie", False: "sxm", None: ""}[pcie]
    gib = _memory_of(text, parts)
    sxm = generation[0].lower() if generation else "none"

    def fit(d: Device) -> tuple[bool, bool, bool]:
        """How well a device fits the text; larger is better."""
        name = d.name.lower()
        return board in name, abs(d.memory_bytes / 2**30 - gib) < 0.01 * gib, sxm in name  # 140.4 GiB is a "141 GB"

    return max(parts, key=fit)


def _parts(text: str) -> list[Device]:
    """The parts with the chip that a text names, in the order of their table."""
    bare = re.sub(r"\(.*?\)|\[.*?\]", " ", text).strip()
    first_words = {_tokens(d.name)[0] for d in devices().values()}
    named = by_name().get(text.strip().lower())  # 4090 is a whole name, and no chip's word
    words_of = (named.name,) if named else (bare, text)
    chip = next((token for words in words_of for token in _tokens(words) if token in first_words), None)
    if chip is None:
        raise TopologyError(f"cannot tell which GPU {text!r} is; {nearest(bare, devices())}")
    return [d for d in devices().values() if _tokens(d.name)[0] == chip]


def other_parts(text: str, taken: Device) -> list[str]:
    """Names of parts that a text could mean as well as the one that was ``taken``: it names their chip, and neither
    their memory nor their board. Raises :class:`TopologyError` where no known chip is named.

    >>> taken = devices()["A100-SXM4-80GB"]
    >>> other_parts("A100 80GB", taken), other_parts("A100-SXM4-80GB", taken)
    (['A100-PCIe-80GB'], [])
    >>> other_parts("4090", devices()["RTX-4090"])
    []
    """
    parts = _parts(text)
    memory = _memory_of(text, parts)
    words = {*re.findall(r"pcie|sxm", text.lower()), *([f"{memory}gb"] if memory else [])}
    others = [d.name for d in parts if d != taken]
    return [name for name in others if all(word in name.lower() for word in words)] if text != taken.name else []


def may_be(text: str, device: Device) -> bool:
    """Whether a text may mean a device, whatever its memory: it names its chip, and no other board. True where it names
    no known chip, and of a device that is not shipped.

    >>> mi300x, a100 = devices()["MI300X"], devices()["A100-SXM4-80GB"]
    >>> may_be("AMD Instinct MI300X", mi300x), may_be("AMD Instinct MI325X", mi300x)
    (True, False)
    >>> may_be("NVIDIA A100-SXM4-40GB", a100), may_be("NVIDIA A100-PCIE-40GB", a100)
    (True, False)
    """
    try:
        parts = _parts(text)
    except TopologyError:
        return True
    if device.name not in devices():
        return True
    board = re.search(r"pcie|sxm", text.lower())
    other_board = {"pcie": "sxm", "sxm": "pcie"}[board[0]] if board else ""
    is_on_other = bool(other_board) and other_board in device.name.lower()
    return not is_on_other and device.name in {part.name for part in parts}


def _memory_of(text: str, parts: Sequence[Device]) -> int:
    """The memory [GB] that a text names, with its unit, or without where one of the ``parts`` has so much; else 0."""
    if named := re.search(r"(\d+)\s*GB", text, re.I):
        return int(named[1])
    sizes = {int(size) for part in parts for size in re.findall(r"(\d+)GB", part.name)}
    bare = (int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])", text))
    return next((number for number in bare if number in sizes), 0)


def _tokens(text: str) -> list[str]:
    """Chip words of a GPU's name: boards and makers dropped, ``RTX 3080 Ti`` and ``TITAN RTX`` joined."""
    text = _JOINED.sub(lambda m: "".join(group for group in m.groups() if group), _BOARD.sub(" ", text.lower()))
    return [word for word in re.split(r"[\s\-,/()]+", text) if word and not re.fullmatch(r"\d+(\.\d+)?(gb)?", word)]
