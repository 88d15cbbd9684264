"""Inputs in the style of what people have are read right, or refused with what to add; none is silently wrong."""

from __future__ import annotations

import people
import pytest

pytest.importorskip("yaml", reason="needs pyyaml (the exchange extra)")


@pytest.mark.parametrize("name", people.NAMES)
def test_what_people_have_is_read_right_or_asked_for(name: str) -> None:
    reading = people.judged(name)
    assert reading.verdict != "wrong", reading.why


def test_the_share_counts_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "trl_zero3"
    stated = people.case(name)
    monkeypatch.setattr(people, "NAMES", [name])
    assert people.main() == 0
    monkeypatch.setattr(people, "case", lambda _: stated | {"right": {"strategy.zero_optimization.stage": 2}})
    assert people.main() == 1
    assert "strategy.zero_optimization.stage is 3, not 2" in capsys.readouterr().out
    monkeypatch.setattr(people, "case", lambda _: stated | {"asks": "a file"})
    assert people.judged(name).verdict == "wrong"
