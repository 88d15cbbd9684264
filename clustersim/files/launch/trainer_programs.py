"""Programs that take the Trainer's arguments and do otherwise than the Trainer: open-instruct's finetuning, and
transformers' examples without a Trainer.

Sources: allenai/open-instruct ``open_instruct/finetune.py``; huggingface/transformers
``examples/pytorch/*/run_*_no_trainer.py`` (4.57).
"""

from __future__ import annotations

import re

from clustersim.files.launch.files import Document, OptionValue

_WITHOUT_TRAINER = re.compile(r"\w+_no_trainer(\.py)?")
_OPEN_INSTRUCT = frozenset(("dataset_mixer", "dataset_mixer_list", "reduce_loss", "use_slow_tokenizer"))
"""Options that tell its ``finetune.py`` from others of that name."""
_LINEARS = ["q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj"]
"""What open-instruct's adapters are beside; no option says other."""
_RANK = 64
"""``lora_rank`` by default, and ``lora_dropout`` beside it."""
_DROPOUT = 0.1


def arranged(file: Document) -> None:
    """Bring what a program does otherwise to the Trainer's and PEFT's names. Changes the document."""
    if _WITHOUT_TRAINER.fullmatch(file.program.rpartition("/")[2]):
        _without_trainer(file)
    names = {name for at, name in file.options if at == "args"}
    if file.program.rpartition("/")[2] in {"finetune", "finetune.py"} and names & _OPEN_INSTRUCT:
        _open_instruct(file)


def _without_trainer(file: Document) -> None:
    """PyTorch's AdamW as it is called without ``fused``, and gradients that nobody clips."""
    for name, value in (("optim", "adamw_torch"), ("max_grad_norm", 0)):
        file.options.setdefault(("args", name), OptionValue(file.program, value, file.name))
    file.notes.append(
        f"{file.name}: {file.program} makes its AdamW itself, which PyTorch runs tensor by tensor in lists (foreach), "
        "and clips no gradients"
    )


def _open_instruct(file: Document) -> None:
    """``use_lora`` and ``use_qlora``; with adapters beside 16 bits no layer is computed again, whatever
    ``gradient_checkpointing`` says (``if args.use_lora: ... elif args.gradient_checkpointing``)."""
    options = file.options
    adapted = options.pop(("args", "use_lora"), None)
    quantized = options.pop(("args", "use_qlora"), None)
    if adapted is None or not adapted.is_on:
        return
    for name, means, usual in (("lora_rank", "lora_r", _RANK), ("lora_dropout", "lora_dropout", _DROPOUT)):
        option = options.pop(("args", name), None)
        options["args", means] = option or OptionValue(adapted.name, usual, adapted.where)
    options["args", "use_peft"] = adapted
    options["args", "lora_target_modules"] = OptionValue("lora_target_modules", _LINEARS, adapted.where)
    if quantized is not None and quantized.is_on:
        options["args", "load_in_4bit"] = quantized
        return
    again = options.pop(("args", "gradient_checkpointing"), None)
    if again is not None and again.is_on:
        file.notes.append(
            f"{again.where}: {again.name}: open-instruct computes no layer again beside adapters of 16 bits"
        )
