"""What processes of a crew share: slow answers are worked out once, and are the same everywhere."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import replace

import pytest
from nccl_systems import system

from clustersim.collectives.nccl import search as searching
from clustersim.collectives.nccl.view import System
from clustersim.core import crew_memo
from clustersim.core.crew_memo import shared_by_crew
from clustersim.studies.sweep.crews import Processes

PATTERNS = 3
"""Patterns that are searched of a node without SHARP: ring, tree and NVLS."""


def searches_of(described: System) -> tuple[int, int, str]:
    """In a worker: its process, how many patterns it searched, and the answer."""
    searched = []

    class Counted(searching._ChannelSearch):
        def result(self):
            searched.append(self.best.pattern)
            time.sleep(0.2)  # so that another worker comes while this one is at it
            return super().result()

    plain, searching._ChannelSearch = searching._ChannelSearch, Counted
    try:
        answer = searching.search(described)
    finally:
        searching._ChannelSearch = plain
    time.sleep(0.5)  # so that the other worker takes the other piece
    return os.getpid(), len(searched), repr(answer)


def forget() -> None:
    """Know no answer in this process."""
    searching.search.cache_clear()
    searching._search_view.cache_clear()


@pytest.fixture
def machine() -> System:
    """One that no other test asks for, so that nobody knows it yet."""
    described = system("dgx1v", 2)
    return replace(described, views=(replace(described.views[0], dev=tuple(range(7, -1, -1))),))


def test_workers_search_the_channels_of_a_machine_once_between_them(machine: System) -> None:
    forget()
    with closing(Processes(2)) as crew:
        futures = [crew.submit(searches_of, machine) for _ in range(2)]
        workers, counts, answers = zip(*(future.result() for future in futures), strict=True)
    assert len(set(workers)) == 2
    assert sum(counts) == PATTERNS
    forget()
    assert set(answers) == {repr(searching.search(machine))}


def test_what_the_caller_searched_is_not_searched_by_its_workers(machine: System) -> None:
    forget()
    with closing(Processes(1)) as crew:
        own = searches_of(machine)
        worker, count, answer = crew.submit(searches_of, machine).result()
    assert own[1] == PATTERNS
    assert count == 0
    assert worker != own[0]
    assert answer == own[2]


def test_a_closed_crew_leaves_nothing_behind() -> None:
    crew = Processes(1)
    folder = crew.shared.name
    assert os.path.isdir(folder)
    crew.mend()
    assert os.path.isdir(folder)
    crew.close()
    assert not os.path.exists(folder)
    assert folder not in crew_memo._FOLDERS


def test_where_the_folder_is_gone_or_a_file_is_torn_the_answer_is_worked_out(tmp_path) -> None:
    asked = []

    @shared_by_crew
    def doubled(number: int) -> int:
        asked.append(number)
        return 2 * number

    crew_memo.join_folder(str(tmp_path / "gone"))
    try:
        assert [doubled(4), doubled(4)] == [8, 8]
    finally:
        crew_memo.leave_folder(str(tmp_path / "gone"))
    crew_memo.join_folder(str(tmp_path))
    try:
        assert [doubled(5), doubled(5)] == [10, 10]
        (stored,) = (path for path in tmp_path.iterdir() if not path.suffix)
        stored.write_bytes(stored.read_bytes()[:2])
        assert doubled(5) == 10
    finally:
        crew_memo.leave_folder(str(tmp_path))
    assert asked == [4, 4, 5, 5]
