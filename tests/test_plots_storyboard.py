"""A ring all-reduce by hand: the storyboard draws the numbers it is given, and its moves are the package's own."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from clustersim.app import plots
from clustersim.app.plots.animation import film_frame
from clustersim.app.plots.storyboard import _contributions
from clustersim.core.errors import ProgramError

N = 4
REDUCE_SCATTER = [[(g, (g + 1) % N, (g - 1 - s) % N, True) for g in range(N)] for s in range(N - 1)]
ALL_GATHER = [[(g, (g + 1) % N, (g - s) % N, False) for g in range(N)] for s in range(N - 1)]
MOVES = REDUCE_SCATTER + ALL_GATHER


def states():
    found = [np.arange(N * N).reshape(N, N)]
    for step in MOVES:
        new = found[-1].copy()
        for src, dst, chunk, add in step:
            new[dst, chunk] = found[-1][src, chunk] + add * found[-1][dst, chunk]
        found.append(new)
    return found


def test_the_moves_of_the_hand_are_those_the_engine_plays():
    film = plots.ring_run(N)
    s = film.schedule
    rows = zip(s.src.tolist(), s.dst.tolist(), s.chunk.tolist(), s.reduce.tolist(), strict=True)
    played = sorted(zip(np.round(film.start, 7).tolist(), rows, strict=True))
    for k, step in enumerate(MOVES):
        assert sorted(row for _, row in played[k * N : (k + 1) * N]) == sorted(step)
    assert film.held(float(film.end.max())).all()


def test_after_the_first_half_each_gpu_has_one_whole_sum_and_after_the_second_everybody_has_all():
    inside = _contributions(N, N, MOVES)
    whole = [state.all(axis=2) for state in inside]
    assert [int(w.sum()) for w in whole] == [0, 0, 0, 4, 8, 12, 16]
    assert whole[N - 1].any(axis=1).all()
    assert (states()[-1] == states()[0].sum(axis=0)).all()


def test_the_storyboard_has_a_panel_for_the_start_and_each_step_with_every_number():
    shown = states()
    figure = plots.storyboard(shown, MOVES)
    assert len(figure.axes) == 2 * (N - 1) + 1
    for axes, state in zip(figure.axes, shown, strict=True):
        drawn = {t.get_position(): t.get_text() for t in axes.texts if t.get_text()}
        assert len(drawn) == N * N
        for (x, y), text in drawn.items():
            assert text == str(state[int(x), int(y)])
    assert figure.axes[0].get_title() == "start"
    assert figure.axes[3].get_title() == "step 3: add what arrives"
    assert "after step 6" in plots.alt_text(figure)
    assert "100% complete" in plots.alt_text(figure)


def test_states_and_steps_must_match():
    with pytest.raises(ProgramError, match="2 states and 6 steps"):
        plots.storyboard(states()[:2], MOVES)
    with pytest.raises(ProgramError, match="states of one shape"):
        plots.storyboard([np.zeros((2, 2)), np.zeros((3, 3))], MOVES[:1])
    with pytest.raises(ProgramError, match="states of one shape"):
        plots.storyboard([], [])


def test_a_film_shows_itself_in_a_notebook(monkeypatch):
    monkeypatch.setattr(sys.modules["clustersim.app.plots.movie"], "FRAMES_A_STEP", 1)
    html = plots.ring_movie(plots.ring_run(2))._repr_html_()
    assert html.startswith('<img alt="A film of a ring all-reduce of 2 GPUs, ')
    assert "data:image/gif;base64,R0lGOD" in html


def test_in_an_all_to_all_everybody_ends_with_the_piece_that_each_had_for_it():
    film = plots.swap_run(nbytes=2.0**20)
    before = film.held(-1.0)
    after = film.held(float(film.end.max()))
    for src in range(4):
        for dst in range(4):
            piece = src * 4 + dst
            assert before[:, piece].any(axis=1).tolist() == [gpu == src for gpu in range(4)]
            assert after[dst, piece, src]
    far = film.schedule.src // 2 != film.schedule.dst // 2
    assert film.end[far].min() > film.end[~far].max()


def test_the_film_of_an_all_to_all_shows_every_piece_once_at_each_moment():
    film = plots.swap_run(nbytes=2.0**20)
    last = float(film.end.max())
    for time in (0.0, 0.3 * last, 0.7 * last, last):
        numbers = [t.get_text() for t in film_frame(film, time).axes[0].texts if t.get_text().isdigit()]
        assert sorted(numbers) == sorted(4 * "0123")
    assert "12 of 12" in film_frame(film, last).axes[0].texts[-2].get_text()
