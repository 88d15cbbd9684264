"""Other names of the ``[parallel]`` fields: Megatron's long ones, torchtitan's and DeepSpeed's, and their defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import msgspec

from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.paths import data_path
from clustersim.core.texts import Table, toml
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


def _two_chunks(said: Table) -> Values:
    """torchtitan gives each rank two stages under a schedule of several, unless it is told their layers."""
    if {"vpp", "layers_per_virtual_stage", "layout"} & set(said):
        return {}
    several = ("interleaved", "loopedbfs", "zbv", "dualpipev")
    return {"vpp": 2} if str(said.get("schedule", "")).lower().startswith(several) else {}


PRESETS: dict[str, Callable[[Table], Values]] = {
    "torchtitan": lambda said: {
        **({"etp": 1} if said.get("ep", 1) != 1 else {}),
        "sequence_parallel": said.get("tp", 1) != 1,
        **_two_chunks(said),
    },
    "deepspeed": lambda said: {"pipeline_partitioned": said.get("tp", 1) != 1 and said.get("pp", 1) != 1},
}
"""Of a framework's defaults, those that follow from what is said; ``data/parallel_names.toml`` has the others. Those of
Megatron-LM are the fields' own."""


def preset(framework: str, said: Table) -> Values:
    """What a framework has where nothing is said."""
    found = _names().presets.get(framework, {})
    return found | PRESETS[framework](said) if framework in PRESETS else found


def field_for(name: str) -> str | None:
    """Where a scenario has what some framework calls ``name``, such as ``"parallel.pp"``; None where nobody does."""
    plain = _plain(name)
    known = _names()
    if plain in known.elsewhere:
        return known.elsewhere[plain]
    if plain in FIELDS or plain in known.same:
        return f"parallel.{known.same.get(plain, plain)}"
    if plain in known.flags:
        return f"parallel.{next(iter(known.flags[plain][0]))}"
    return None


def translate(table: Table) -> tuple[Values, Values]:
    """The table, as written by any names, by its fields' own names.

    Returns the fields, and beside them what belongs to other tables, by dotted name (``"strategy.micro_batch_size"``).
    Raises :class:`ScenarioError` for a name that nobody has, with the nearest, and where two names give one field
    different values, naming both.
    """
    found: Values = {}
    said: dict[str, str] = {}
    for name, value in _flat(table):
        for field, meant in _meaning(name, value).items():
            if field in found and found[field] != meant:
                raise ScenarioError(
                    f"{said[field]} = {found[field]!r} and {name} = {value!r} contradict each other; write {field} "
                    f"once (at $.parallel.{field})"
                )
            found.setdefault(field, meant)
            said.setdefault(field, name)
    _batches(found)
    here = {field: value for field, value in found.items() if "." not in field}
    return here, {field: value for field, value in found.items() if "." in field}


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
    known = _names()
    if plain in known.flags:
        if not isinstance(value, bool):
            raise ScenarioError(f"{name} = {value!r} does not fit: expected true or false (at $.parallel.{name})")
        return known.flags[plain][0 if value else 1]
    if plain in known.choices:
        if value not in known.choices[plain]:
            right = ", ".join(map(repr, known.choices[plain]))
            raise ScenarioError(f"{name} = {value!r} is not a choice; known: {right} (at $.parallel.{name})")
        return known.choices[plain][value]
    if plain in _SPECIAL:
        return _SPECIAL[plain](value)
    if plain in known.elsewhere:
        return {known.elsewhere[plain]: value}
    if plain in known.same or plain in FIELDS:
        return {known.same.get(plain, plain): value}
    near = nearest(plain, [*FIELDS, *known.same, *known.flags, *known.choices, *known.elsewhere, *_SPECIAL])
    near = near if near.startswith("did") else f"the first ones are {', '.join(FIELDS[1:5])} (docs: ParallelConfig)"
    raise ScenarioError(f"unknown field {name!r} = {value!r}; {near} (at $.parallel.{name})")


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


def _batches(found: Values) -> None:
    """torchtitan's ``local_batch_size`` is what a replica sees at once: all micro-batches of a pipeline together."""
    local = found.pop("local.batch_size", None)
    if not isinstance(local, int):
        return
    each = found.get("strategy.micro_batch_size")
    count = found.get("microbatches")
    if isinstance(each, int) and each > 0 and local % each == 0:
        found["microbatches"] = local // each
    elif each is None and isinstance(count, int) and count > 0 and local % count == 0:
        found["strategy.micro_batch_size"] = local // count
    elif each is None and count is None:
        found["strategy.micro_batch_size"] = local
    else:
        raise ScenarioError(
            f"local_batch_size = {local} does not divide into micro-batches of {each} samples or into {count} of them "
            "(at $.parallel.local_batch_size)"
        )
