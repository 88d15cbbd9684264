"""prime-rl's finetuning: sections that are on when they are there, its deployment, and adapters by PEFT's names.

Names and defaults: PrimeIntellect-ai/prime-rl ``packages/prime-rl-configs/src/prime_rl/configs/trainer.py`` (at
004274ec) and ``sft.py`` (at 0111b1ba), and ``src/prime_rl/trainer``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import toml
from clustersim.files.launch import unread
from clustersim.files.launch.adapters import number
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.table import FrameworkTable
from clustersim.model import named_models as models
from clustersim.model.published import known_as

TELLING = ("model.*|optim.*", "model.*|data.seq_len", "model.*|data.batch_size", "optim.*|model.ac.*", "model.ep")
"""Keys that together tell a file of prime-rl, any one group of them."""
OF_DATA = ("data.batch_size", "data.seq_len", "data.name", "data.type", "data.micro_batch_size", "loss_impl")
"""What its finetuning says, and its trainer of reinforcement learning does not."""
SECTIONS = {"compile": "prime.compiled", "ac": "prime.again", "ac_offloading": "prime.offloaded"}
"""Sections of ``[model]`` that are on when they are there, even empty, and the table's names for that."""
EXPERTS = ("experts", "fc1_latent_proj", "fc2_latent_proj")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Where adapters are if nobody says it, and modules that a model without experts has not."""
RANK = 16


def is_launch(document: Document) -> bool:
    """Whether a command, or a file, is one of prime-rl's."""
    names = [name for _, name in document.options]
    if unread.of_file(document.program, dict.fromkeys(names)) is not None:
        return False  # reinforcement learning
    if document.program.startswith("prime_rl"):
        return True
    of_titan = any(name.startswith(("job.", "training.", "parallelism.", "activation_checkpoint.")) for name in names)
    return document.kind == "toml" and not of_titan and unread.has_group(names, TELLING)


def arranged(read: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Bring options to the table's names. Changes ``options``; returns notes.

    Raises :class:`ScenarioError` for a file of the trainer of reinforcement learning, and for adapters of experts.
    """
    if table.name != "prime-rl":
        return []
    file = next((document for document in read if document.kind == "toml"), read[0])
    if not any(("config", name) in options for name in OF_DATA):
        raise ScenarioError(
            f"{file.name}: holds no data.batch_size and no data.seq_len: is it of prime-rl's reinforcement learning, "
            "whose steps are made of generated text? Its sft is read"
        )
    sections = {name: _is_on(file, options, name) for name in (*SECTIONS, "lora")}
    sections["ac"] = sections["ac"] or sections["ac_offloading"]
    for name, known in SECTIONS.items():
        if sections[name]:
            options["config", known] = OptionValue(f"model.{name}", True, file.name)
    dispatch = options.get(("config", "model.ep_comm_backend"))
    if dispatch is not None and dispatch.value == "deepep":  # beside which nothing is clipped
        options["config", "optim.max_norm"] = OptionValue(dispatch.name, 0.0, dispatch.where)
    notes = _deployed(options, file)
    return notes + (_adapters(options, file) if sections["lora"] else [])


def _is_on(file: Document, options: Mapping[Key, OptionValue], name: str) -> bool:
    """Whether a section of the model is there: its keys, or an empty table."""
    whole = options.get(("config", f"model.{name}"))
    if whole is not None:
        return str(whole.value).lower() not in {"none", "null", "false"}
    if any(key[1].startswith(f"model.{name}.") for key in options):
        return True
    model = toml(file.text, file.name, ScenarioError).get("model") if file.kind == "toml" else None
    return isinstance(model, Mapping) and name in model


def _deployed(options: dict[Key, OptionValue], file: Document) -> list[str]:
    """Nodes and GPUs of ``[deployment]``, whose one node has one GPU unless it says more; returns a note."""
    deployed = {name: option for (_, name), option in options.items() if name.startswith("deployment.")}
    if not deployed:
        return [
            f"{file.name}: no [deployment], with which sft starts one GPU; all of a launcher's, or of nodes, are taken"
        ]
    kind = deployed.get("deployment.type")
    is_single = kind is None or kind.value != "multi_node"
    if is_single:
        nodes = OptionValue("deployment.type", 1, file.name)
        gpus = deployed.get("deployment.num_gpus", OptionValue("deployment.num_gpus", 1, file.name))
    else:
        nodes = deployed.get("deployment.num_nodes", OptionValue("deployment.num_nodes", 2, file.name))
        gpus = deployed.get("deployment.gpus_per_node", OptionValue("deployment.gpus_per_node", 8, file.name))
        groups = deployed.get("deployment.nodes_per_fsdp_group")
        if groups is not None:
            replicas, left = divmod(number(nodes, whole=True), max(1, number(groups, whole=True)))
            if left:
                raise ScenarioError(f"{groups.where}: {groups.as_written} does not divide {nodes.value} nodes")
            options["config", "model.dp_replicate"] = OptionValue(groups.name, replicas, groups.where)
    options["config", "prime.nodes"], options["config", "prime.gpus"] = nodes, gpus
    return []


def _adapters(options: dict[Key, OptionValue], file: Document) -> list[str]:
    """LoRA in PEFT's words; modules that the model has not are passed over; returns a note."""
    model = options.get(("config", "model.name"))
    shipped_name = None if model is None else known_as(str(model.value))
    shape = None if shipped_name is None else models.shape(shipped_name, {})
    if shape is not None and shape.experts is not None:
        raise ScenarioError(f"{file.name}: model.lora of a model with experts, whose adapters are not played")
    rank = options.pop(("config", "model.lora.rank"), OptionValue("model.lora.rank", RANK, file.name))
    named = options.pop(("config", "model.lora.target_modules"), None)
    saved = options.pop(("config", "model.lora.modules_to_save"), None)
    dropout = options.pop(("config", "model.lora.dropout"), None)
    where = file.name if named is None else named.where
    words = TARGETS if named is None else named.value if isinstance(named.value, list) else [named.value]
    targets = [word for word in words if word not in EXPERTS]
    options["config", "peft_type"] = OptionValue("model.lora", "lora", file.name)
    options["config", "r"] = rank
    options["config", "target_modules"] = OptionValue("model.lora.target_modules", targets, where)
    if saved is not None:
        options["config", "modules_to_save"] = saved
    if dropout is not None:
        options["config", "lora_dropout"] = dropout
    return []
