"""Peak memory of a step beside torch's own MemTracker, of Hugging Face's models: the table of ``torch_peaks``."""

from __future__ import annotations

import pytest
from torch_peaks import AGAIN, BATCH, CASES, FAMILIES, TOKENS, Case, kept, tracked

from clustersim.model import from_hf
from clustersim.training.memory import Training, memory


def predicted(family: str, types: str, attention: str, checkpointing: str) -> float:
    """What is said of it here."""
    config_class, _, fields = FAMILIES[family]
    config = {"model_type": config_class.removesuffix("Config").lower(), **fields}
    kernels = "eager" if attention == "eager" else "flash"
    head = {"head": "mlm"} if family == "bert" else {}
    model = from_hf(config, seq_len=TOKENS, attention=kernels, implementation="eager", **head)
    run = Training(
        micro_batch_size=BATCH,
        dtype="fp32" if types == "fp32" else "bf16",
        param_dtype="bf16" if types == "bf16" else "fp32",
        activation_checkpointing=checkpointing,
    )
    return memory(model, run).allocated


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_peak_is_torchs_own_within_three_percent(case: Case) -> None:
    assert predicted(*case) == pytest.approx(kept()[case], rel=0.03)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.filterwarnings("ignore:Module is None:UserWarning")
@pytest.mark.parametrize("case", AGAIN, ids="-".join)
def test_the_table_is_what_torch_says_today(case: Case) -> None:
    assert tracked(*case) == kept()[case]
