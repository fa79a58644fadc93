"""Typed reading of a checkpoint's configuration: every wrong value is refused by its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freetoken.vocab.errors import CheckpointError

_REQUIRED: Any = object()


class ConfigReader:
    """Reads typed values from ``config.json`` (or the same keys made from GGUF metadata).

    A key that is absent or ``null`` takes its default; without a default it is an error. All methods raise
    ``CheckpointError`` naming the key, with its path (``text_config.hidden_size``).
    """

    def __init__(self, config: Mapping[str, object], path: str = "") -> None:
        self._config = config
        self._path = path

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and not ``null``."""
        return self._config.get(key) is not None

    def child(self, key: str, inherit: tuple[str, ...] = ()) -> ConfigReader:
        """The reader of a nested object; an absent one reads as empty. Keys in ``inherit`` may come from here."""
        value = self._config.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.refusal(key, "it must be an object")
        outer = {k: self._config[k] for k in inherit if self.has(k) and value.get(k) is None}
        return ConfigReader({**value, **outer}, f"{self._path}{key}.")

    def integer(self, key: str, default: int = _REQUIRED, minimum: int = 1) -> int:
        """A whole number of at least ``minimum``."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refusal(key, "it must be a whole number")
        if value < minimum:
            raise self.refusal(key, f"it must be at least {minimum}")
        return value

    def optional_integer(self, key: str, minimum: int = 0) -> int | None:
        """A whole number, or ``None`` where the key is absent."""
        return self.integer(key, minimum=minimum) if self.has(key) else None

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A finite positive number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refusal(key, "it must be a number")
        if not 0 < value < float("inf"):
            raise self.refusal(key, "it must be positive and finite")
        return float(value)

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        """``true`` or ``false``."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "it must be true or false")
        return value

    def text(self, key: str, default: str = _REQUIRED) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "it must be a string")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where the key is absent."""
        return tuple(self._list(key, str, "strings"))

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, or a single one; empty where the key is absent."""
        value = self._config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        return tuple(self._list(key, int, "whole numbers"))

    def refuse_unless(self, key: str, *allowed: object, default: object = None) -> None:
        """Raise unless the value of ``key`` (``default`` where absent) is one of the ``allowed``."""
        value = self._config.get(key)
        value = default if value is None else value
        if value not in allowed:
            raise self.refusal(key, "implemented: " + ", ".join(_shown(a) for a in allowed))

    def refusal(self, key: str, why: str) -> CheckpointError:
        """The error that refuses ``key``'s value."""
        if key in self._config:
            asked = f"config: {self._path}{key} = {_shown(self._config[key])}"
        else:
            asked = f"config: {self._path}{key} is missing"
        return CheckpointError(asked, why, "use a checkpoint of an implemented kind, or correct its config.json")

    def _value(self, key: str, default: object) -> Any:
        value = self._config.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.refusal(key, "the model cannot be built without it")
        return default

    def _list(self, key: str, kind: type, plural: str) -> list[Any]:
        value = self._config.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(isinstance(v, kind) for v in value):
            raise self.refusal(key, f"it must be a list of {plural}")
        return list(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
