"""Files of profilers that are not read are named, with what to give instead; nothing in a pickle is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from clustersim.core.errors import TraceError
from clustersim.files import traces

JAX = (
    '{"displayTimeUnit":"ns","traceEvents":[{"ph":"M","pid":1,"name":"process_name","args":{"name":"/device:GPU:0"}},'
    '{"ph":"X","pid":1,"tid":1,"ts":10.0,"dur":5.0,"name":"fusion_3","args":{"hlo_op":"fusion.3"}}]}'
)
ASCEND = '[{"ph":"M","name":"process_name","pid":1,"args":{"name":"Ascend Hardware"}}]'
NVPROF = '==1== NVPROF is profiling process 1, command: python a.py\n"Type","Time(%)","Time","Calls"\n'
TABLE = "----  ----\n    Name    Self CPU %      Self CPU   CPU total %     CPU total  # of Calls\n----  ----\n"
UNREAD = {
    "memory": (pickle.dumps({"segments": [], "device_traces": [[]]}), "snapshot of PyTorch's memory.*export_chrome"),
    "table": (TABLE.encode(), "table of torch.profiler's key_averages.*export_chrome_trace"),
    "nvprof": (NVPROF.encode(), "report of nvprof.*nsys profile"),
    "jax": (JAX.encode(), "profile of JAX or XLA.*nsys"),
    "xplane": (b"\x0a\x40\x08\x01\x12\x0b/device:GPU:0 (NVIDIA)".ljust(120, b"\0"), "profile of JAX or XLA"),
    "ascend": (ASCEND.encode(), "profile of Ascend NPUs"),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_what_is_not_read_is_named_with_what_is(tmp_path: Path, kind: str):
    data, words = UNREAD[kind]
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=words):
        traces.read(path)


class Harmful:
    """A pickle of it would make a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_snapshots_pickle_is_not_run(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps({"segments": Harmful(tmp_path / "made"), "device_traces": [[]]}))
    with pytest.raises(TraceError):
        traces.read(path)
    assert not (tmp_path / "made").exists()
