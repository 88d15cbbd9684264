"""Peak memory of a step beside torch's own MemTracker, of Hugging Face's models: the table of ``torch_peaks``."""

from __future__ import annotations

import pytest
from torch_peaks import AGAIN, CASES, Case, kept, predicted, tracked


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_peak_is_torchs_own_within_three_percent(case: Case) -> None:
    assert predicted(*case) == pytest.approx(kept()[case], rel=0.03)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.filterwarnings("ignore:Module is None:UserWarning")
@pytest.mark.parametrize("case", AGAIN, ids="-".join)
def test_the_table_is_what_torch_says_today(case: Case) -> None:
    assert tracked(*case) == kept()[case]
