"""Pipelines of torchtitan's files: their schedules, and how many micro-batches those of 2024 have."""

from __future__ import annotations

from clustersim.core.errors import ScenarioError
from clustersim.files.launch.files import Key, OptionValue
from clustersim.files.launch.table import FrameworkTable

BATCH = 8
"""``training.batch_size`` of a file that does not say it."""
PARALLEL = "parallelism.pipeline_parallel_"
_BATCHES: tuple[Key, ...] = (("config", "training.batch_size"), ("config", "training.local_batch_size"))
COUNTS = ("experimental.pipeline_parallel_microbatches", "training.pipeline_parallel_microbatches")


def batches_of_2024(options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Micro-batches of a pipeline, said as how many there are."""
    _schedule(options, table)
    counts = [options.pop(key) for key in [("config", name) for name in COUNTS] if key in options]
    degree = options.get(("config", f"{PARALLEL}degree"))
    old = counts or (degree is not None and degree.name.lstrip("-").startswith(("experimental.", "training.")))
    stages = 1 if degree is None else count_in(degree)
    micro: Key = ("config", f"{PARALLEL}microbatch_size")
    if not old or stages < 2 or micro in options:
        return []
    count = counts[0] if counts else None
    passes = count_in(count) if count is not None else stages * (2 if _looped(options) else 1)
    batch = next((options[key] for key in _BATCHES if key in options), None)
    samples = BATCH if batch is None else count_in(batch)
    if samples % passes:
        where = next(option.where for option in (count, degree, batch) if option is not None)
        raise ScenarioError(f"{where}: a batch of {samples} samples is not made of {passes} micro-batches")
    if count is not None:
        options[micro] = OptionValue(count.name, samples // passes, count.where)
        return []
    options[micro] = OptionValue("micro-batches", samples // passes, "")
    return [f"the batch is cut into {passes} micro-batches, one for each stage, as nobody says how many"]


def count_in(option: OptionValue) -> int:
    """A count. Raises :class:`ScenarioError` for none."""
    try:
        count = int(str(option.value))
    except ValueError:
        count = 0
    if not 1 <= count < 2**31:
        raise ScenarioError(f"{option.where}: {option.name} {option.value!r} does not fit: expected a whole number")
    return count


def _schedule(options: dict[Key, OptionValue], table: FrameworkTable) -> None:
    """A schedule by the table's word. Raises :class:`ScenarioError` for DualPipeV one pass after another."""
    key: Key = ("config", f"{PARALLEL}schedule")
    if key not in options:
        return
    schedule = options[key]
    overlap = options.get(("config", f"{PARALLEL}expert_parallel_overlap"))
    if overlap is not None and str(overlap.value).lower() == "false" and schedule.value == "DualPipeV":
        raise ScenarioError(
            f"{overlap.where}: {overlap.name} false beside DualPipeV is not played, whose passes lie beside each "
            "other; say true, or another schedule"
        )
    words = {str(pair[0]).lower(): pair[0] for row in table.rows if row.option == key[1] for pair in row.map or ()}
    word = str(schedule.value).lower().replace("_", "")
    options[key] = OptionValue(schedule.name, words.get(word, schedule.value), schedule.where)


def _looped(options: dict[Key, OptionValue]) -> bool:
    """Whether a rank has two stages, as schedules that loop have where no split points say more."""
    schedule = options.get(("config", f"{PARALLEL}schedule"))
    return schedule is not None and str(schedule.value).lower() not in {"1f1b", "gpipe"}
