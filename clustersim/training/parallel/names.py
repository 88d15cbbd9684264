"""Other names of the ``[parallel]`` fields: Megatron's long ones, torchtitan's and DeepSpeed's, and their defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import msgspec

from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.paths import data_path
from clustersim.core.texts import Table, short, shown, toml
from clustersim.training.parallel.config import ParallelConfig

FIELDS: tuple[str, ...] = ParallelConfig.__struct_fields__

Values = Table


class _Names(msgspec.Struct, frozen=True):
    """What ``data/parallel_names.toml`` says, where each part is explained."""

    tables: frozenset[str]
    same: dict[str, str]
    flags: dict[str, tuple[Values, Values]]
    choices: dict[str, dict[object, Values]]
    elsewhere: dict[str, str]
    presets: dict[str, Values]


@lru_cache(maxsize=1)
def _names() -> _Names:
    path = data_path("data") / "parallel_names.toml"
    return msgspec.convert(toml(path.read_text(encoding="utf-8"), path.name, ScenarioError), _Names)


def _two_chunks(stated: Table) -> Values:
    """torchtitan gives each rank two stages under a schedule of several, unless it is told their layers."""
    if {"vpp", "layers_per_virtual_stage", "layout"} & set(stated):
        return {}
    several = ("interleaved", "loopedbfs", "zbv", "dualpipev")
    return {"vpp": 2} if str(stated.get("schedule", "")).lower().startswith(several) else {}


PRESETS: dict[str, Callable[[Table], Values]] = {
    "torchtitan": lambda stated: {
        **({"etp": 1} if stated.get("ep", 1) != 1 else {}),
        "sequence_parallel": stated.get("tp", 1) != 1,
        **_two_chunks(stated),
    },
    "deepspeed": lambda stated: {"pipeline_partitioned": stated.get("tp", 1) != 1 and stated.get("pp", 1) != 1},
}
"""Of a framework's defaults, those that follow from what is said; ``data/parallel_names.toml`` has the others. Those of
Megatron-LM are the fields' own."""


def preset(framework: str, stated: Table) -> Values:
    """What a framework has where nothing is said."""
    preset_values = _names().presets.get(framework, {})
    return preset_values | PRESETS[framework](stated) if framework in PRESETS else preset_values


def field_for(name: str) -> str | None:
    """Where a scenario has what some framework calls ``name``, such as ``"parallel.pp"``; None where nobody does."""
    plain = _plain(name)
    names_table = _names()
    if plain in names_table.elsewhere:
        return names_table.elsewhere[plain]
    if plain in FIELDS or plain in names_table.same:
        return f"parallel.{names_table.same.get(plain, plain)}"
    if plain in names_table.flags:
        return f"parallel.{next(iter(names_table.flags[plain][0]))}"
    return None


def translate(table: Table) -> tuple[Values, Values]:
    """The table, as written by any names, by its fields' own names.

    Returns the fields, and beside them what belongs to other tables, by dotted name (``"strategy.micro_batch_size"``).
    Raises :class:`ScenarioError` for a name that nobody has, with the nearest, and where two names give one field
    different values, naming both.
    """
    values: Values = {}
    named: dict[str, str] = {}
    for name, value in _flat(table):
        for field, meant in _meaning(name, value).items():
            if field in values and values[field] != meant:
                raise ScenarioError(
                    f"{named[field]} = {values[field]!r} and {name} = {value!r} contradict each other; write {field} "
                    f"once (at $.parallel.{field})"
                )
            values.setdefault(field, meant)
            named.setdefault(field, name)
    _batches(values)
    parallel_values = {field: value for field, value in values.items() if "." not in field}
    return parallel_values, {field: value for field, value in values.items() if "." in field}


def _flat(table: Table) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if _plain(name) in _names().tables and isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", inside) for inner, inside in value.items())
        else:
            yield name, value


def _plain(name: str) -> str:
    """``"--tensor-model-parallel-size"`` and ``"activation_checkpoint.mode"`` as they are looked up."""
    name = name.removeprefix("--").replace("-", "_")
    table, _, inner = name.rpartition(".")
    return inner if inner not in {"mode", "stages", "stage", "partition_method"} else f"{table}_{inner}".lstrip("_")


def _meaning(name: str, value: object) -> Values:
    plain = _plain(name)
    names_table = _names()
    if plain in names_table.flags:
        if not isinstance(value, bool):
            raise ScenarioError(f"{name} = {value!r} does not fit: expected true or false (at $.parallel.{name})")
        return names_table.flags[plain][0 if value else 1]
    if plain in names_table.choices:
        if value not in names_table.choices[plain]:
            right = ", ".join(map(repr, names_table.choices[plain]))
            raise ScenarioError(f"{name} = {value!r} is not a choice; known: {right} (at $.parallel.{name})")
        return names_table.choices[plain][value]
    if plain in _SPECIAL:
        return _SPECIAL[plain](value)
    if plain in names_table.elsewhere:
        return {names_table.elsewhere[plain]: value}
    if plain in names_table.same or plain in FIELDS:
        return {names_table.same.get(plain, plain): value}
    near = nearest(
        plain, [*FIELDS, *names_table.same, *names_table.flags, *names_table.choices, *names_table.elsewhere, *_SPECIAL]
    )
    near = near if near.startswith("did") else f"the first ones are {', '.join(FIELDS[1:5])} (docs: ParallelConfig)"
    raise ScenarioError(f"unknown field {shown(name)} = {shown(value)}; {near} (at $.parallel.{short(name)})")


def _interval(value: object) -> Values:
    """DeepSpeed's ``activation_checkpoint_interval``: 0 is none, n keeps the input of every n-th layer."""
    if not value:
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": value}


_SPECIAL: dict[str, Callable[[object], Values]] = {
    "activation_checkpoint_interval": _interval,
    "pipeline_stages": lambda value: {} if value == "auto" else {"pp": value},
    "pipeline_partition_method": lambda value: {"partition_method": value},
    "routing": lambda value: {"routing": {"kind": value} if isinstance(value, str) else value},
    "context_parallel_load_balancer": lambda value: {"cp_load_balancer": value or "none"},
    "zero_optimization_stage": lambda value: {"strategy.zero_optimization.stage": value},
    "local_batch_size": lambda value: {"local.batch_size": value},
    "pipeline_parallel_microbatch_size": lambda value: {"strategy.micro_batch_size": value},
}


def _batches(values: Values) -> None:
    """torchtitan's ``local_batch_size`` is what a replica sees at once: all micro-batches of a pipeline together."""
    local = values.pop("local.batch_size", None)
    if not isinstance(local, int):
        return
    micro_batch = values.get("strategy.micro_batch_size")
    count = values.get("microbatches")
    if isinstance(micro_batch, int) and micro_batch > 0 and local % micro_batch == 0:
        values["microbatches"] = local // micro_batch
    elif micro_batch is None and isinstance(count, int) and count > 0 and local % count == 0:
        values["strategy.micro_batch_size"] = local // count
    elif micro_batch is None and count is None:
        values["strategy.micro_batch_size"] = local
    else:
        raise ScenarioError(
            f"local_batch_size = {local} does not divide into micro-batches of {micro_batch} samples or into {count} "
            f"of them (at $.parallel.local_batch_size)"
        )
