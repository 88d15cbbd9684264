"""What launch files leave open, which is asked for together: an answer at a time would be a run of the command each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clustersim.core.errors import ScenarioError


class OpenQuestion(ScenarioError):
    """What no launch file says, and an option of the command, a file or a value of theirs would.

    ``file`` : that is asked of, a path. ``words`` : what it does not say, and what to give.
    """

    def __init__(self, file: str, words: str) -> None:
        super().__init__(f"{file}: {words}")
        self.file = file
        self.words = words


class OpenQuestions:
    """Those of one launch, as far as they were met."""

    def __init__(self) -> None:
        self._met: list[OpenQuestion] = []

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Go on behind the part that asks: what is next may ask as well."""
        try:
            yield
        except OpenQuestion as question:
            self._met.append(question)

    def ask(self) -> None:
        """Raise :class:`OpenQuestion` with all that were met, each once."""
        if not self._met:
            return
        first = self._met[0]
        parts = dict.fromkeys(
            question.words if question.file == first.file else str(question) for question in self._met
        )
        raise OpenQuestion(first.file, "; ".join(parts))
