"""Keys of a Hugging Face config.json, read with errors that name file, key and what it is for."""

from __future__ import annotations

import msgspec

from clustersim.core.errors import ModelError, nearest
from clustersim.core.texts import Table

_TEXT_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu_new", "gelu_python": "gelu", "silu": "swiglu"}


class Config(msgspec.Struct, frozen=True):
    """A config.json's keys and where they came from, for messages that name both."""

    where: str
    data: Table

    def need(self, key: str, what: str) -> int:
        """The whole number under ``key``; ModelError naming file, key and what it is for when it is not there."""
        if self.data.get(key) is None:
            raise ModelError(f"{self.where}: missing '{key}', {what}{self._hint(key)}")
        return self._whole(key, self.data[key], what)

    def number(self, key: str, default: int, what: str) -> int:
        """The whole number under ``key``, or the family's default where it is missing or null."""
        value = self.data.get(key)
        return default if value is None else self._whole(key, value, what)

    def whole(self, key: str, default: int, what: str) -> int:
        """As :meth:`number`, where zero is a number too."""
        return 0 if self.data.get(key) == 0 else self.number(key, default, what)

    def flag(self, key: str, default: bool) -> bool:
        """The truth value under ``key``."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be true or false")
        return value

    def rate(self, key: str, default: float) -> bool:
        """Whether a dropout probability is above zero."""
        value = self.data.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be a probability from 0 to 1")
        return value > 0

    def text(self, key: str, default: str) -> str:
        """The text under ``key``."""
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be text such as {default!r}")
        return value

    def _whole(self, key: str, value: object, what: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be a whole number above zero, {what}")
        return value

    def _hint(self, key: str) -> str:
        hint = nearest(key, self.data) if self.data else ""
        return f"; {hint}" if hint.startswith("did you mean") else ""

    def head_dim(self, width: int, heads: int) -> int:
        """The config's own ``head_dim``, or ``width / heads``; ModelError where that does not divide."""
        if self.data.get("head_dim") is not None:
            return self.need("head_dim", "the size of a head")
        if width % heads:
            raise ModelError(f"{self.where}: {heads} attention heads do not divide a width of {width} evenly")
        return width // heads

    def activation(self, key: str, default: str) -> str:
        """An MLP activation's name as clustersim writes it."""
        name = self.text(key, default)
        return _TEXT_ACTIVATIONS.get(name, name)
