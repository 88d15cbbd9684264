"""What profilers and benchmarks write and is not read says what to give instead; what is left out of shares is told."""

from pathlib import Path

import pytest

from clustersim.app.report.content import page
from clustersim.core.errors import TraceError
from clustersim.core.facts import RunFacts
from clustersim.core.saved_run import SavedRun
from clustersim.explain.compare import compare
from clustersim.explain.explain import explain
from clustersim.files.traces import read, sniff


def test_a_profile_of_perfetto_is_told_what_to_record(tmp_path: Path):
    path = tmp_path / "results.pftrace"
    path.write_bytes(b"\n\x20\x50\x03\x08\x01" + b"\x00" * 40)
    with pytest.raises(TraceError, match=r"rocprofv3's \.pftrace.*--kernel-trace --output-format csv"):
        sniff(path)


HEAD = '"Kind","Agent_Id","Queue_Id","Kernel_Name","Start_Timestamp","End_Timestamp"\n'
COMPUTE = '"KERNEL_DISPATCH","Agent 4",1,"Cijk_Ailk_Bljk",1000,201000\n'


@pytest.mark.parametrize(
    ("kernel", "told"),
    [("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", 1), ("Cijk_Ailk_Bjlk", 0)],
)
def test_collectives_that_a_profile_does_not_name_are_told_beside_the_shares(tmp_path: Path, kernel: str, told: int):
    """Of RCCL's one kernel, "GPUs compute all the time" was all that was said."""
    path = tmp_path / "kernel_trace.csv"
    path.write_text(f'{HEAD}{COMPUTE}"KERNEL_DISPATCH","Agent 4",2,"{kernel}",201000,401000\n')
    warned = [text for text in explain(read([path])).warnings if text.startswith("left out 1: a collective's kernel")]
    assert len(warned) == told


def test_transfers_that_nobody_could_read_are_unknown_on_the_page_too_and_in_a_comparison(tmp_path: Path):
    """`trace` said "not known" of what its page called 0.0 % of the step, and a comparison a difference to 0 s."""
    kernels = "".join(
        f'"KERNEL_DISPATCH","Agent 4",{queue},"{name}",{begin},{begin + 200000}\n'
        for queue, name, begin in ((1, "Cijk_Ailk_Bljk", 1000), (2, "ncclDevKernel_Generic_4(int)", 201000))
    )
    path = tmp_path / "kernel_trace.csv"
    path.write_text(f"{HEAD}{kernels}")
    timeline = read([path])
    shown = page(SavedRun(timeline, None, RunFacts()))
    assert "What is transferred, and who waits for it, is not known: the collectives were left out." in shown
    assert "of communication" not in shown
    assert "<dt>exposed transfer</dt>" not in shown
    assert [text for text in compare(timeline, timeline).text if text.startswith("B: left out 1: a collective")]


def test_a_folder_of_folders_is_not_called_empty(tmp_path):
    """`trace CAPTURE/traces` called a folder empty in which each mode has its own."""
    for name in ("ddp", "single"):
        (tmp_path / name).mkdir()
    with pytest.raises(TraceError, match=r"no trace file, only the folder\(s\) ddp, single; name the trace files"):
        read(tmp_path)
