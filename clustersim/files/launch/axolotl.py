"""axolotl's files: what they say otherwise than the Trainer's arguments, whose names they have for the rest."""

from __future__ import annotations

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


def arranged(one: Document) -> None:
    """What axolotl says otherwise than the Trainer (its src/axolotl/utils/schemas/config.py)."""
    for name in ("bf16", "bfloat16"):
        said = one.options.pop(("args", name), None)
        if said is not None:  # "auto" is true where the GPU has it
            flag = True if str(said.value).lower() in {"auto", "full"} else said.value
            one.options["args", "bf16"] = OptionValue(said.name, flag, said.where)
    for name, words in _PLUGINS.items():
        said = next((one.options[key] for word in words if (key := ("args", word)) in one.options), None)
        if said is not None and said.value is True:
            one.options["args", name] = OptionValue(said.name, True, said.where)
        for word in words:
            one.options.pop(("args", word), None)
    _axolotl_kernels(one)
    half = one.options.pop(("args", "float16"), None)
    if half is not None and half.value is True:
        one.options["args", "fp16"] = half
    _loaded(one)
    plugins = one.options.get(("args", "plugins"))
    if plugins is not None and "CutCrossEntropy" in str(plugins.value):
        usual = OptionValue("cut_cross_entropy (of CutCrossEntropyPlugin)", True, plugins.where)
        one.options.setdefault(("args", "cut_cross_entropy"), usual)
    elif plugins is not None:  # which nothing but the plugin reads
        one.options.pop(("args", "cut_cross_entropy"), None)
    _axolotl_shards(one)
    _axolotl_batch(one)


def _axolotl_kernels(one: Document) -> None:
    """What is compiled, what is computed again or waits on the host, and which kernels attend."""
    compiled = one.options.get(("args", "torch_compile"))
    if compiled is not None and compiled.value is True and ("args", "liger_kernels") in one.options:
        del one.options["args", "torch_compile"]  # what is Liger's stays Liger's
        one.notes.append(f"{one.name}: kernels are Liger's, and torch_compile adds nothing to them")
    again = one.options.get(("args", "gradient_checkpointing"))
    if again is not None and again.value == "offload":  # what is kept for backward waits in the host's memory
        for name in ("gradient_checkpointing", "activation_offloading"):
            one.options["args", name] = OptionValue(again.name, True, again.where)
    offloaded = one.options.get(("args", "activation_offloading"))
    if offloaded is not None and offloaded.value == "legacy":  # to the host as well, without a stream of its own
        one.options["args", "activation_offloading"] = OptionValue(offloaded.name, True, offloaded.where)
    kernel = one.options.pop(("args", "attention"), None)
    if kernel is not None:
        means = _KERNELS.get(str(kernel.value), kernel.value)
        one.options.setdefault(("args", "attn_implementation"), OptionValue(kernel.name, means, kernel.where))


def _axolotl_shards(one: Document) -> None:
    """FSDP by its table or version alone, as accelerate's file says it."""
    sharded = any(key[1].startswith((f"{SECTION}.", "fsdp_version")) for key in one.options)
    if sharded and ("args", "fsdp") not in one.options:
        one.options["config", "distributed_type"] = OptionValue(SECTION, "FSDP", one.name)
    version = one.options.pop(("args", "fsdp_version"), None)
    if version is not None:
        one.options["config", f"{SECTION}.fsdp_version"] = version


def _axolotl_batch(one: Document) -> None:
    """Samples of a pass, 1 where nothing says them, and its passes from those of a step of one rank."""
    one.options.setdefault(("args", "micro_batch_size"), OptionValue("micro_batch_size", 1, one.name))
    whole = one.options.pop(("args", "batch_size"), None)
    micro = str(one.options["args", "micro_batch_size"].value)
    if whole is not None and micro.isdecimal() and str(whole.value).isdecimal():
        passes = max(1, int(whole.value) // max(1, int(micro)))  # ``normalize_config`` of its utils/config
        key = "args", "gradient_accumulation_steps"
        one.options.setdefault(key, OptionValue(whole.name, passes, whole.where))


def _loaded(one: Document) -> None:
    """What axolotl loads weights in, which a whole model is then trained in (``normalize_config`` of its
    src/axolotl/utils/config/__init__.py, ``_set_quantization_config`` of loaders/model.py, axolotl 0.19)."""
    if str(getattr(one.options.get(("args", "adapter")), "value", "") or "None") != "None":
        return
    for name, means in (("bf16", "bfloat16"), ("fp16", "float16")):
        said = one.options.get(("args", name))
        if said is not None and said.value is True and ("args", "torch_dtype") not in one.options:
            one.options["args", "torch_dtype"] = OptionValue(said.name, means, said.where)
            one.notes.append(f"{one.name}: axolotl loads weights in {means} and, without shards, trains them in it")
            return
