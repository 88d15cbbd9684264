"""axolotl's files: what they say otherwise than the Trainer's arguments, whose names they have for the rest."""

from __future__ import annotations

from clustersim.files.launch import grouped_experts
from clustersim.files.launch.files import Document, OptionValue

SECTION = "fsdp_config"
"""Of accelerate's file, which axolotl's has too."""
_PLUGINS = {
    "liger_kernels": ("liger_rms_norm", "liger_rope", "liger_glu_activation", "liger_swiglu", "liger_layer_norm"),
    "liger_loss": ("liger_fused_linear_cross_entropy",),
}
"""Of axolotl's Liger plugin (src/axolotl/integrations/liger/args.py)."""


_KERNELS = {"flash": "flash_attention_2", "flex": "flex_attention"}
"""Of axolotl's ``attention``, where they are not called as transformers calls them."""


def arranged(document: Document) -> None:
    """What axolotl says otherwise than the Trainer (its src/axolotl/utils/schemas/config.py)."""
    for name in ("bf16", "bfloat16"):
        option = document.options.pop(("args", name), None)
        if option is not None:  # "auto" is true where the GPU has it
            flag = True if str(option.value).lower() in {"auto", "full"} else option.value
            document.options["args", "bf16"] = OptionValue(option.name, flag, option.where)
    for name, words in _PLUGINS.items():
        option = next((document.options[key] for word in words if (key := ("args", word)) in document.options), None)
        if option is not None and option.value is True:
            document.options["args", name] = OptionValue(option.name, True, option.where)
        for word in words:
            document.options.pop(("args", word), None)
    _axolotl_kernels(document)
    grouped_experts.taken(document)
    half = document.options.pop(("args", "float16"), None)
    if half is not None and half.value is True:
        document.options["args", "fp16"] = half
    _loaded(document)
    plugins = document.options.get(("args", "plugins"))
    if plugins is not None and "CutCrossEntropy" in str(plugins.value):
        usual = OptionValue("cut_cross_entropy (of CutCrossEntropyPlugin)", True, plugins.where)
        document.options.setdefault(("args", "cut_cross_entropy"), usual)
    elif plugins is not None:  # which nothing but the plugin reads
        document.options.pop(("args", "cut_cross_entropy"), None)
    _axolotl_shards(document)
    _axolotl_batch(document)


def _axolotl_kernels(document: Document) -> None:
    """What is compiled, what is computed again or waits on the host, and which kernels attend."""
    compiled = document.options.get(("args", "torch_compile"))
    if compiled is not None and compiled.value is True and ("args", "liger_kernels") in document.options:
        del document.options["args", "torch_compile"]  # what is Liger's stays Liger's
        document.notes.append(f"{document.name}: kernels are Liger's, and torch_compile adds nothing to them")
    again = document.options.get(("args", "gradient_checkpointing"))
    if again is not None and again.value == "offload":  # what is kept for backward waits in the host's memory
        for name in ("gradient_checkpointing", "activation_offloading"):
            document.options["args", name] = OptionValue(again.name, True, again.where)
    offloaded = document.options.get(("args", "activation_offloading"))
    if offloaded is not None and offloaded.value == "legacy":  # to the host as well, without a stream of its own
        document.options["args", "activation_offloading"] = OptionValue(offloaded.name, True, offloaded.where)
    kernel = document.options.pop(("args", "attention"), None)
    if kernel is not None:
        means = _KERNELS.get(str(kernel.value), kernel.value)
        document.options.setdefault(("args", "attn_implementation"), OptionValue(kernel.name, means, kernel.where))


def _axolotl_shards(document: Document) -> None:
    """FSDP by its table or version alone, as accelerate's file says it."""
    sharded = any(key[1].startswith((f"{SECTION}.", "fsdp_version")) for key in document.options)
    if sharded and ("args", "fsdp") not in document.options:
        document.options["config", "distributed_type"] = OptionValue(SECTION, "FSDP", document.name)
    version = document.options.pop(("args", "fsdp_version"), None)
    if version is not None:
        document.options["config", f"{SECTION}.fsdp_version"] = version


def _axolotl_batch(document: Document) -> None:
    """Samples of a pass, 1 where nothing says them, and its passes from those of a step of one rank."""
    document.options.setdefault(("args", "micro_batch_size"), OptionValue("micro_batch_size", 1, document.name))
    global_batch = document.options.pop(("args", "batch_size"), None)
    micro = str(document.options["args", "micro_batch_size"].value)
    if global_batch is not None and micro.isdecimal() and str(global_batch.value).isdecimal():
        passes = max(1, int(global_batch.value) // max(1, int(micro)))  # ``normalize_config`` of its utils/config
        key = "args", "gradient_accumulation_steps"
        document.options.setdefault(key, OptionValue(global_batch.name, passes, global_batch.where))


def _loaded(document: Document) -> None:
    """What axolotl loads weights in, which a whole model is then trained in (``normalize_config`` of its
    src/axolotl/utils/config/__init__.py, ``_set_quantization_config`` of loaders/model.py, axolotl 0.19)."""
    if str(getattr(document.options.get(("args", "adapter")), "value", "") or "None") != "None":
        return
    for name, means in (("bf16", "bfloat16"), ("fp16", "float16")):
        option = document.options.get(("args", name))
        if option is not None and option.value is True and ("args", "torch_dtype") not in document.options:
            document.options["args", "torch_dtype"] = OptionValue(option.name, means, option.where)
            document.notes.append(
                f"{document.name}: axolotl loads weights in {means} and, without shards, trains them in it"
            )
            return
