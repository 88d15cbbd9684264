"""NCCL's variables that a script hands on, as a field of the scenario."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from clustersim.collectives.nccl.settings import PLAYED, NcclSettings, settings_of
from clustersim.files.launch.files import Document, OptionValue
from clustersim.files.launch.options import ScenarioFields


def taken(read: Sequence[Document], fields: ScenarioFields) -> None:
    """Put NCCL's variables that change what is played into the fields. Raises :class:`ScenarioError` where two files
    set one differently."""
    usual = NcclSettings()
    for file in read:
        for name, value in file.nccl.items():
            if name in PLAYED and msgspec.structs.replace(settings_of({name: value}), notes=()) != usual:
                fields.say(f"run.nccl_environment.{name}", value, OptionValue(name, value, file.name))
