"""Step times of Composer's console log (llm-foundry's as well): ``Train name: value`` below ``[batch=20/40]:``.

``SpeedMonitor`` (composer/callbacks/speed_monitor.py) logs batches and samples a second of all GPUs together, each a
mean over up to its ``window_size`` of batches, with four digits behind the point: of batches that take minutes,
samples a second say more, by the samples of a batch, which ``time/sample`` and ``time/batch`` tell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HEAD = re.compile(r"\[batch=(\d{1,12})/\d+\]:")
_VALUE = re.compile(
    r"\bTrain (?P<name>(?:throughput/(?:batches|samples|tokens)_per_sec|time/(?:batch|sample))|throughput/device/"
    r"(?:tokens_per_sec|mfu|flops_per_sec)):\s*(?P<value>\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
)
SHAPE = re.compile(r"\bTrain throughput/(?:device/)?(?:batches|samples)_per_sec:\s*\d")
_RATES = {
    "throughput/tokens_per_sec": ("tokens/s", 1.0),
    "throughput/samples_per_sec": ("samples/s", 1.0),
    "throughput/device/mfu": ("MFU (%)", 100.0),
    "throughput/device/flops_per_sec": ("TFLOP/s per GPU", 1e-12),
}


@dataclass
class ComposerBlocks:
    """What the blocks of a log say, by the number of a batch."""

    batch: int = 0
    blocks: dict[int, dict[str, float]] = field(default_factory=dict)

    def take(self, line: str) -> None:
        """What one line says."""
        if head := _HEAD.search(line):
            self.batch = int(head[1])
        for match in _VALUE.finditer(line) if "Train " in line else ():
            self.blocks.setdefault(self.batch, {})[match["name"]] = float(match["value"])

    def steps(self) -> list[tuple[int, float]]:
        """Seconds of a batch, by its number."""
        told = ((batch, _per_second(values)) for batch, values in sorted(self.blocks.items()))
        return [(batch, 1 / rate) for batch, rate in told if rate > 0]

    def rates(self) -> dict[str, list[float]]:
        """Other means, by name and unit."""
        found: dict[str, list[float]] = {}
        for values in self.blocks.values():
            for key, (name, scale) in _RATES.items():
                if key in values:
                    found.setdefault(name, []).append(values[key] * scale)
        return found


def _per_second(values: dict[str, float]) -> float:
    """Batches a second."""
    samples, batches = values.get("time/sample", 0.0), values.get("time/batch", 0.0)
    if samples and batches and values.get("throughput/samples_per_sec"):
        return values["throughput/samples_per_sec"] * batches / samples
    return values.get("throughput/batches_per_sec", 0.0)
