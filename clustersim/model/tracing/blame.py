"""What a module's own code raised, as one sentence: which line of it, what went wrong, and what to do."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import torch
from torch._subclasses import fake_tensor

from clustersim.core.errors import ModelError
from clustersim.model.tracing.loading import Target

DATA_DEPENDENT = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
PACKAGE = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).resolve().parent


def blamed(error: BaseException, target: Target, doing: str) -> ModelError:
    """An error of the module's own code. ``doing`` : ``"built"``, or ``"run on tokens[4, 8192]"``."""
    return ModelError(f"{_line_of(error, target)}{_problem(error, target, doing)}")


def _line_of(error: BaseException, target: Target) -> str:
    """The innermost line of the code that is traced; torch's and this package's are not it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shortened(error.filename, target)}:{error.lineno}: "
    own = target.file.resolve().parent if target.file else None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    outside = [frame for frame in frames if not _is_below(frame.filename, TORCH, PACKAGE)]
    near = [frame for frame in outside if own is not None and _is_below(frame.filename, own)]
    chosen = [frame for frame in near if "site-packages" not in frame.filename] or near or outside
    if not chosen:
        return f"{target.words}: "
    last = chosen[-1]
    text = (linecache.getline(last.filename, last.lineno or 0) or "").strip()
    return f"{_shortened(last.filename, target)}:{last.lineno}: {text[:120]!r}: "


def _shortened(filename: str, target: Target) -> str:
    if target.file is not None and Path(filename).resolve() == target.file.resolve():
        return str(target.file)
    return filename


def _is_below(filename: str, *folders: Path) -> bool:
    path = Path(filename).resolve()
    return any(path.is_relative_to(folder) for folder in folders)


def _problem(error: BaseException, target: Target, doing: str) -> str:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, ModuleNotFoundError):
        return f"no module {error.name!r} is installed; pip install it beside torch, or leave out what needs it"
    if isinstance(error, SyntaxError):
        return f"is not Python: {error.msg}"
    if isinstance(error, DATA_DEPENDENT) or "meta tensor" in text or "on a meta" in text:
        what = f"what follows depends on the numbers in a tensor ({type(error).__name__}: {text[:120]})"
        return (
            f"{what}, and a trace has shapes alone; write it with torch.where or a mask of fixed size, or let the "
            "function build a module without this branch"
        )
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        return f"an operator has no shape rule ({text[:150]}); register one with torch.library.register_fake"
    if "FlexAttention" in text:
        return (
            "FlexAttention is not traced, since its kernels are a GPU's alone; for the trace write "
            "scaled_dot_product_attention, with is_causal=True or a mask, in its place"
        )
    if isinstance(error, SystemExit):
        return "it ended the process; a module that is traced must not"
    return f"{type(error).__name__} as it was {doing}: {text}"
