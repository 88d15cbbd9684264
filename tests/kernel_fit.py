"""Fit the kernel laws to measured kernels, and print how well they meet GPUs in sample and left out.

``python tests/kernel_fit.py`` reads ``../shared/measurements/kernels``, prints a table and, with ``--write``, writes
``clustersim/data/kernel_law.toml``. A GPU left out is predicted from its sheet and what the others say of its
generation; where no other GPU is of its generation, so is the generation left out. Every fit, left out or not, begins
in the same round numbers and goes on until its error no longer falls.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import kernel_forms as forms
import numpy as np
import numpy.typing as npt
from kernel_errors import Fitted, Judged, class_errors, lines, with_own_rows
from kernel_kind import Kind
from kernel_products import held
from kernel_rows import DEVICES, GPUS, Kernels
from scipy.optimize import least_squares

from clustersim.core.paths import data_path
from clustersim.core.texts import data_table
from clustersim.model.seconds.kernel_law.constants import without_sources
from tests.evidence.forgotten import chip_of

Floats = npt.NDArray[np.float64]


def fit(kind: Kind, rows: Kernels, start: Fitted, generations: Sequence[str]) -> Fitted:
    """Constants with the least robust error of the logarithm; levels are held near 0 by a prior.

    Slopes are taken with each product at its best tiles: where a constant changes by little, so do they alone.
    """
    free = list(kind.free)
    low = np.array([kind.free[name][0] for name in free] + [-1.0] * len(generations))
    high = np.array([kind.free[name][1] for name in free] + [1.0] * len(generations))
    first = np.array([start.constants[name] for name in free] + [start.levels.get(g, 0.0) for g in generations])
    first = np.clip(first, low + 1e-3 * (high - low), high - 1e-3 * (high - low))
    measured = np.log(rows.seconds)
    weights = weights_of(rows)
    guess = kind.seconds(rows)

    def unpacked(point: Floats) -> Fitted:
        constants = dict(start.constants) | dict(zip(free, point[: len(free)].tolist(), strict=True))
        levels = dict(zip(generations, point[len(free) :].tolist(), strict=True))
        return Fitted(constants, levels if generations else start.levels)

    def residuals(point: Floats) -> Floats:
        answer = unpacked(point)
        errors = (np.log(guess(answer.constants, answer.levels)) - measured) * weights
        return np.concatenate([errors, PRIOR * point[len(free) :]])

    def slopes(point: Floats) -> Floats:
        here = residuals(point)
        steps = np.where(point < (low + high) / 2, 1e-4, -1e-4) * (high - low)
        with held():
            columns = [(residuals(point + step) - here) / step.sum() for step in np.diag(steps)]
        return np.stack(columns, axis=1)

    scale = np.concatenate([(high - low)[: len(free)] * 0.1, np.full(len(generations), 0.1)])
    answer = least_squares(
        residuals,
        first,
        jac=slopes,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.06,
        x_scale=scale,
        ftol=1e-5,
        max_nfev=TRIES,
    )
    told = np.any(slopes(answer.x)[: len(rows.rows)] != 0.0, axis=0)
    return unpacked(np.where(told, answer.x, first))  # where no row tells, steps are chance


TRIES = 200
"""Steps of a fit at most; all but a few end before, where the error no longer falls."""
PRIOR = 5.0
"""Weight of a generation's level: its prior has a width of 0.2 row's error."""


def generations_of(kind: Kind, rows: Kernels) -> list[str]:
    """Whose levels are fitted: those of the rows' GPUs, of a kind that has levels of its own."""
    return sorted(set(rows.generation.tolist())) if kind.level else []


def weights_of(rows: Kernels) -> Floats:
    """Every GPU counts the same, and of a GPU every publisher."""
    pairs = [(row["system"], row.get("publisher", "")) for row in rows.rows]
    counts = Counter(pairs)
    publishers = Counter(system for system, _ in counts)
    shares = np.array([1.0 / (counts[pair] * publishers[pair[0]]) for pair in pairs])
    return np.sqrt(shares / shares.mean())


def left_out(kind: Kind, rows: Kernels, without: Mapping[str, dict[str, Fitted]]) -> Floats:
    """Predicted seconds of each row by constants fitted without its GPU, those of its base included, from where every
    fit begins; ``without`` has the latter by GPU and kind, and is given this kind's."""
    systems = rows.words("system")
    predicted = np.zeros(len(rows.rows))
    if len(set(systems.tolist())) < 2:
        return np.full(len(rows.rows), np.nan)
    chips = np.array([chip_of(DEVICES[name]) for name in systems.tolist()])
    for name in sorted({*GPUS, *systems.tolist()}, key=list(DEVICES).index):
        same = chips == chip_of(DEVICES[name])
        own = rows.take(systems == name)
        others = rows.take(~same)
        known = without.setdefault(name, {})
        fitted = fit(kind, others, start_of(kind, known), generations_of(kind, others))
        known[kind.name] = fitted
        if own.rows:
            predicted[systems == name] = kind.seconds(own)(fitted.constants, fitted.levels)
    return predicted


def start_of(kind: Kind, known: Mapping[str, Fitted]) -> Fitted:
    """Where a fit begins: in round numbers, and where its base ended. Of what its rows do not tell it knows nothing
    else."""
    base = known[kind.base] if kind.base else Fitted({}, {})
    return Fitted({**kind.start, **base.constants, **kind.own}, base.levels)


def judge(kind: Kind, known: Mapping[str, Fitted], without: dict[str, dict[str, Fitted]], *, leave_out: bool) -> Judged:
    """Fit one kind, and say how far it is off; ``without`` as :func:`left_out` has it."""
    rows = kind.read()
    fitted = fit(kind, rows, start_of(kind, known), generations_of(kind, rows))
    classes = kind.classes(rows)
    in_sample = class_errors(rows, kind.seconds(rows)(fitted.constants, fitted.levels), classes)
    if not leave_out:
        return Judged(fitted, len(rows.rows), in_sample, {}, {})
    predicted = left_out(kind, rows, without)
    return Judged(
        fitted,
        len(rows.rows),
        in_sample,
        class_errors(rows, predicted, classes),
        with_own_rows(rows, predicted, classes),
    )


def study(kind: Kind, known: Mapping[str, Fitted], without: dict[str, dict[str, Fitted]], *, leave_out: bool) -> Fitted:
    """Fit one kind, print its errors, and return its constants; ``without`` as :func:`left_out` has it."""
    judged = judge(kind, known, without, leave_out=leave_out)
    print(f"{kind.name}: {judged.rows} rows")
    parts = {
        "in sample": judged.in_sample,
        "one GPU left out": judged.left_out,
        "ten rows of it known": judged.own_rows,
    }
    for title, errors in parts.items():
        if errors:
            print(f"  {title}", *lines(errors), sep="\n", flush=True)
    return judged.fitted


def written(found: Mapping[str, Fitted]) -> str:
    """The text of the data file."""
    lines = [HEADER]
    levels: list[str] = ["[levels]"]
    for kind in forms.KINDS:
        answer = found.get(kind.name) or shipped(kind)
        names = [name for name in answer.constants if name in kind.shipped]
        values = (f"{name} = {answer.constants[name]:.5g}" for name in names)
        lines += [f"[{kind.section}]", *values, f'source = "{source_of(kind, answer)}"', ""]
        if kind.level:
            inside = ", ".join(f"{name} = {value:.4f}" for name, value in sorted(answer.levels.items()))
            levels.append(f"{kind.level} = {{ {inside} }}")
    return "\n".join([*lines, *levels, LEVEL_SOURCE, ""])


LEVEL_SOURCE = f'source = "fit: beside the constants of the same kinds, each with a prior of weight {PRIOR:g} around 0"'
OTHERS = "nvidia_attention.csv"
"""The table of attention that others than the database's makers published."""
TABLES = {
    "attention.backward": OTHERS,
    "attention.bf16": f"attention.csv.gz and {OTHERS}",
    "attention.mla": "mla.csv.gz",
    "attention": "attention.csv.gz",
    "experts": "moe.csv.gz",
    "products": "gemm.csv.gz",
    "stream": "quantize.csv.gz",
}
"""Section of the data file, or the beginning of one, -> the table whose rows it is fitted on."""
AT_BOUND = 1e-3
"""Of a constant's range, how near its end is at it."""


def source_of(kind: Kind, answer: Fitted) -> str:
    """Where constants are from: the table that they are fitted on, which are not, and which are held by a bound."""
    table = next((name for part, name in TABLES.items() if kind.section.startswith(part)), "linear_attention.csv.gz")
    shown = {name: value for name, value in answer.constants.items() if name in kind.shipped}
    held = [name for name, value in shown.items() if name in kind.free and _at_bound(value, kind.free[name])]
    taken = [name for name in shown if name not in kind.free]
    family = kind.section.removeprefix("scans.")
    words = [f"fit: {table}" + (", one GPU's rows" if family in forms.MEASURED_UNDER else "")]
    words += [f"held at their bound: {', '.join(held)}"] if held else []
    words += [f"prior, in round numbers and not fitted: {', '.join(taken)}"] if taken else []
    return "; ".join(words)


def _at_bound(value: float, bounds: tuple[float, float]) -> bool:
    return min(abs(value - end) for end in bounds) < AT_BOUND * (bounds[1] - bounds[0])


def written_without(without: Mapping[str, Mapping[str, Fitted]]) -> str:
    """Constants of :data:`SINGLE` without one GPU after the other: the text of ``tests/evidence/data``'s file."""
    lines = [WITHOUT_HEADER]
    for system in GPUS:
        fits = without[system]
        chip = chip_of(GPUS[system])
        levels = [f"[{chip}.levels]"]
        for kind in forms.KINDS:
            if kind.name not in fits or not kind.section.startswith(SINGLE):
                continue
            answer = fits[kind.name]
            names = [name for name in answer.constants if name in kind.shipped]
            lines += [f"[{chip}.{kind.section}]", *(f"{name} = {answer.constants[name]:.5g}" for name in names), ""]
            if kind.level:
                inside = ", ".join(f"{name} = {value:.4f}" for name, value in sorted(answer.levels.items()))
                levels.append(f"{kind.level} = {{ {inside} }}")
        lines += [*levels, ""]
    return "\n".join(lines)


def shipped(kind: Kind) -> Fitted:
    """What the data file says of a kind."""
    raw = without_sources(data_table("kernel_law"))
    constants = raw
    for name in kind.section.split("."):
        constants = constants[name]
    return Fitted(constants, raw["levels"].get(kind.level, {}))


def with_base(kind: Kind, known: Mapping[str, Fitted]) -> Fitted:
    """What the data file says of a kind, and of its base where it says nothing."""
    own = shipped(kind)
    base = known[kind.base].constants if kind.base else {}
    return Fitted({**base, **kind.start, **own.constants}, own.levels)


HEADER = """# Constants of the kernel laws, written by `python tests/kernel_fit.py --write`.
# Fitted on measured kernels of A100, H100, B200, GB200 and RTX PRO 6000, as re-tabulated from the performance database
# of github.com/ai-dynamo/aiconfigurator @ 095f58a51c4ca8e61b66ec108d86f223f8d559ce (Apache-2.0, NVIDIA); attention also
# on what others published of A100 to GB300 (tests/data/nvidia_attention.csv).
# source: the table that a part is fitted on, and which of its constants are not.
# [levels]: what a generation adds to the logarithm of a rate.
"""
SINGLE = ("products.", "attention.b", "experts", "scans.")
"""Sections of laws that a step uses, which have constants for each GPU that is left out."""
WITHOUT_HEADER = """\
# Constants of what a step is made of that no kernel of one GPU had a part in, by the GPU that was left out, written by
# `python tests/kernel_fit.py --without FILE` from the kernels that clustersim/data/kernel_law.toml is fitted on.
"""


def main() -> None:
    """Fit what the command line names; everything without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="kinds to print; all without")
    parser.add_argument("--write", action="store_true", help="write their constants to data/kernel_law.toml")
    parser.add_argument("--without", type=Path, help="write what kernels of a step are without each GPU to this file")
    parser.add_argument("--quick", action="store_true", help="in sample only, on bases as they are shipped")
    chosen = parser.parse_args()
    found: dict[str, Fitted] = {}
    without: dict[str, dict[str, Fitted]] = {name: {} for name in GPUS}
    needed = [kind for kind in forms.KINDS if not chosen.kinds or kind.name in chosen.kinds]
    bases = {kind.base for kind in needed}
    bases |= {kind.base for kind in forms.KINDS if kind.name in bases}
    for kind in forms.KINDS:
        if kind in needed or (kind.name in bases and not chosen.quick):
            found[kind.name] = study(kind, found, without, leave_out=not chosen.quick)
        elif kind.name in bases:
            found[kind.name] = with_base(kind, found)
    if chosen.write:
        text = written(found)
        (data_path("data") / "kernel_law.toml").write_text(text, encoding="utf-8")
    if chosen.without:
        chosen.without.write_text(written_without(without), encoding="utf-8")


if __name__ == "__main__":
    main()
