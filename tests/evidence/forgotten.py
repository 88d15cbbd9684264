"""A GPU left out: steps predicted as if nobody had ever measured the GPU that they ran on.

What was measured on a GPU, or estimated from that, is forgotten: shares of its peaks, its bandwidth and charts of its
attention kernels, which then follow the kernel law. In their place stands what other GPUs of its generation were
measured at, or, where there are none, the median of all that were measured, as ``[family.other]`` has it for
``clustersim new device``; in fp32, of those whose SMs have as many fp32 units, which a data sheet tells: twice as many
share what feeds them, and reach 0.5 to 0.75 of their peak where others reach 0.9. Figures that are estimates relative
to its generation keep their ratio. The kernel law is the one that ``tests/kernel_fit.py --without`` fitted without the
GPU. Each GPU's rows are played in a process of their own, which forgets and then begins.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

from clustersim.calibrate.score import PredictedRow, evaluate, grouped, predicted
from clustersim.core import device
from clustersim.core.errors import ClusterSimError
from clustersim.core.texts import Table, data_table
from clustersim.model.seconds.kernel_law import constants
from clustersim.scenario.file.reading import read_toml
from tests.evidence.hybrid_rows import is_hybrid, scenario_table
from tests.evidence.sharded_rows import is_sharded, read_sharded
from tests.evidence.software import Row
from tests.evidence.step_rows import read
from tests.evidence.validate_steps import predict_step

LAWS = Path(__file__).parent / "data" / "kernel_law_without.toml"
"""Constants of what a step is made of, by the GPU that they were fitted without."""
CHIP = re.compile(r"(?:RTX-PRO|RTX|TITAN)-[^-]+|[^-]+")
"""A device's name without its board and memory."""


def left_out_rows(rows: Iterable[Row]) -> list[PredictedRow]:
    """The rows that can be predicted, each with its GPU forgotten."""
    by_chip = grouped(rows, chip_of_row)
    by_chip.pop("", None)
    played: list[PredictedRow] = []
    for chip, own in by_chip.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=forget, initargs=(chip,)) as process:
            played += process.submit(_played, own).result()
    return played


def _played(rows: list[Row]) -> list[PredictedRow]:
    return predicted(evaluate(rows, predict_step))


def chip_of_row(row: Row) -> str:
    """The chip that a row ran on; "" of a row that cannot be played."""
    try:
        if is_hybrid(row):
            return chip_of(scenario_table(row)["cluster"]["device"])
        return chip_of((read_sharded(row) if is_sharded(row) else read(row)).device.name)
    except (ValueError, ClusterSimError):
        return ""


def chip_of(name: str) -> str:
    """A device's chip.

    >>> chip_of("A100-SXM4-80GB"), chip_of("TITAN-RTX"), chip_of("RTX-PRO-6000-Server"), chip_of("MI300X")
    ('A100', 'TITAN-RTX', 'RTX-PRO', 'MI300X')
    """
    words = CHIP.match(name)
    return words.group() if words else name


def forget(chip: str) -> None:
    """Make this process forget what was measured on a chip, before it has asked for any device."""
    table = forgotten(data_table("devices"), chip)
    law = without(chip)
    patch.object(device, "_raw", lambda: table).start()
    patch.object(constants, "data_table", lambda name: law).start()
    for cached in (device.devices, device.by_name, constants.kernel_laws):
        cached.cache_clear()


def without(chip: str) -> Table:
    """The kernel law that was fitted without a chip; the shipped one where it was never fitted on it."""
    law = data_table("kernel_law")
    own = read_toml(LAWS).get(chip, {})
    return {
        **law,
        **{kind: {**law[kind], **part} for kind, part in own.items() if kind != "levels"},
        "levels": {**law["levels"], **own.get("levels", {})},
    }


def forgotten(table: Table, chip: str) -> Table:
    """A table of devices as it would be without what was measured on a chip."""
    table = copy.deepcopy(table)
    entries = {name: device._inherit(name, table["device"]) for name in table["device"]}
    own = [name for name in entries if chip_of(name) == chip]
    usual = table["family"][device.UNKNOWN]
    others = [table["device"][name] for name in entries if name not in own]
    for arch in {entries[name]["family"] for name in own}:
        family = table["family"][arch]
        kin = [table["device"][name] for name in entries if entries[name]["family"] == arch and name not in own]
        units = family.get("fp32_a_clock")
        alike = [
            table["device"][name]
            for name, entry in entries.items()
            if name not in own and table["family"][entry["family"]].get("fp32_a_clock") == units
        ]
        shares = {
            dtype: _likely(
                _measured(kin, dtype),
                _measured(alike if dtype == "fp32" and units else others, dtype),
                usual["matmul"].get(dtype, 0.7),
            )
            for dtype in family["matmul"]
        }
        for name in own:
            _forget_shares(table["device"][name], family["matmul"], shares)
        family["attention"] = {kernel: {} for kernel in family["attention"]}
        family["stream"] = _likely(_measured(kin, "stream"), _measured(others, "stream"), usual["stream"])
        family["matmul"] = shares
    return table


def _measured(entries: Iterable[Table], figure: str) -> list[float]:
    """A share as it was measured on each of some devices: of a dtype's peak, or of the bandwidth."""
    figures = (entry.get("matmul", {}).get(figure) or entry.get(figure) for entry in entries)
    return [value for value, source in filter(None, figures) if not source.startswith("estimated")]


def _likely(kin: list[float], others: list[float], usual: float) -> float:
    """The mean of a generation; where nothing of it was measured, the median of all that was."""
    return fmean(kin) if kin else median(others) if others else usual


def _forget_shares(entry: Table, before: Mapping[str, float], now: Mapping[str, float]) -> None:
    """Leave of a device's own figures the estimates, which keep their ratio to the generation's."""
    entry.pop("stream", None)
    for dtype, (value, source) in list(entry.get("matmul", {}).items()):
        entry["matmul"][dtype] = [min(1.0, value / before[dtype] * now[dtype]), source]
        if not source.startswith("estimated"):
            del entry["matmul"][dtype]
