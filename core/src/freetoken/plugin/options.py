"""Options are fields: from one frozen attrs class per owner, the flag, variable, file key and docs row are derived."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from attrs import frozen

from freetoken.plugin.specs import OptionsSpec
from freetoken.vocab.errors import OptionError, PluginError
from freetoken.vocab.units import parse_bytes

_META = "freetoken"
CORE_OWNER = "core"


@frozen
class OptionMeta:
    """What ``option`` was told beyond type and default."""

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    aliases: tuple[str, ...] = ()
    repeated: bool = False
    metavar: str = ""


def option(
    default: Any,
    *,
    help: str,
    unit: str = "",
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    aliases: tuple[str, ...] = (),
    repeated: bool = False,
    metavar: str = "",
) -> Any:
    """A field of an option class.

    ``aliases`` are further spellings: with ``--`` in front a flag, in upper case an environment variable.
    ``unit="bytes"`` accepts ``"16 GiB"``. ``repeated`` (for ``tuple[str, ...]``) lets the flag be given several times.
    ``metavar`` is what ``--help`` shows for the value, where unit, choices and name do not say it.
    """
    meta = OptionMeta(help, unit, choices, low, high, aliases, repeated, metavar)
    return attrs.field(default=default, metadata={_META: meta}, kw_only=True)


@frozen
class OptionField:
    """One option, with every name it goes by."""

    owner: str
    name: str
    type: object
    default: object
    meta: OptionMeta

    @property
    def flag(self) -> str:
        return "--" + self._joined("-").replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag and its aliases."""
        return (self.flag, *(a for a in self.meta.aliases if a.startswith("--")))

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variable and its aliases."""
        own = "FREETOKEN_" + self._joined("_").replace("-", "_").upper()
        return (own, *(a for a in self.meta.aliases if not a.startswith("--")))

    @property
    def file_key(self) -> str:
        """Where it lives in ``freetoken.toml``: ``key`` for the core's, ``section.key`` for a plugin's."""
        return self.name if self.owner == CORE_OWNER else f"{self.owner}.{self.name}"

    @property
    def optional(self) -> bool:
        return type(None) in typing.get_args(self.type)

    @property
    def base_type(self) -> object:
        """The type without ``None``."""
        if isinstance(self.type, types.UnionType) or typing.get_origin(self.type) is typing.Union:
            rest = [a for a in typing.get_args(self.type) if a is not type(None)]
            return rest[0] if len(rest) == 1 else str
        return self.type

    def _joined(self, sep: str) -> str:
        return self.name if self.owner == CORE_OWNER else f"{self.owner}{sep}{self.name}"

    def read(self, raw: object, origin: str) -> object:
        """``raw`` (text, or a value of the file) as this option's type; ``OptionError`` naming ``origin``."""
        try:
            value = _READERS.get(self._reader_key(), _read_other)(raw, self)
        except (ValueError, TypeError) as error:
            raise OptionError(f"{origin} = {raw!r}", str(error), self._hint()) from None
        self._check(value, origin)
        return value

    def _reader_key(self) -> object:
        return "bytes" if self.meta.unit == "bytes" else self.base_type

    def _check(self, value: object, origin: str) -> None:
        if value is None:
            return
        if self.meta.choices and value not in self.meta.choices:
            raise OptionError(f"{origin} = {value!r}", f"{self.flag} does not know this value", self._hint())
        low, high = self.meta.low, self.meta.high
        if isinstance(value, int | float) and not isinstance(value, bool):
            if low is not None and value < low:
                raise OptionError(f"{origin} = {value}", f"{self.flag} must be at least {low:g}", self._bounds())
            if high is not None and value > high:
                raise OptionError(f"{origin} = {value}", f"{self.flag} must be at most {high:g}", self._bounds())

    def _bounds(self) -> str:
        low, high = self.meta.low, self.meta.high
        return f"give {self.flag} a value {f'from {low:g}' if low is not None else ''}" + (
            f" to {high:g}" if high is not None else " on"
        )

    def _hint(self) -> str:
        if self.meta.choices:
            return f"use one of {', '.join(self.meta.choices)}"
        kind = "a size such as 16GiB" if self.meta.unit == "bytes" else getattr(self.base_type, "__name__", "a value")
        return f"{self.flag} takes {kind}" + (", or auto" if self.optional else "")


def _read_bool(raw: object, _: OptionField) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{raw!r} is neither true nor false")


def _none_or(raw: object, field: OptionField, read: Callable[[object], object]) -> object:
    if field.optional and (raw is None or str(raw).strip().lower() in ("auto", "none", "")):
        return None
    return read(raw)


def _read_int(raw: object, field: OptionField) -> object:
    if isinstance(raw, bool | float):
        raise ValueError(f"{raw!r} is not a whole number")
    return _none_or(raw, field, lambda r: int(str(r)))


def _read_float(raw: object, field: OptionField) -> object:
    if isinstance(raw, bool):
        raise ValueError(f"{raw!r} is not a number")
    return _none_or(raw, field, lambda r: float(str(r)))


def _read_bytes(raw: object, field: OptionField) -> object:
    return _none_or(raw, field, lambda r: parse_bytes(r if isinstance(r, int) else str(r)))


def _read_str(raw: object, field: OptionField) -> object:
    if not isinstance(raw, str | int | float) or isinstance(raw, bool):
        raise ValueError(f"{raw!r} is not text")
    return _none_or(raw, field, str)


def _read_other(raw: object, _: OptionField) -> object:
    """A tuple of strings: a list in the file, comma-separated text elsewhere."""
    if isinstance(raw, str):
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    if isinstance(raw, list | tuple) and all(isinstance(item, str) for item in raw):
        return tuple(raw)
    raise ValueError(f"{raw!r} is not a list of names")


_READERS: Mapping[object, Callable[[object, OptionField], object]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    "bytes": _read_bytes,
}


def option_fields(spec: OptionsSpec) -> tuple[OptionField, ...]:
    """The options of one owner; ``PluginError`` when the class is not frozen, or a field lacks a default or a help."""
    cls = spec.cls
    if not attrs.has(cls):
        raise PluginError(
            f"options of {spec.owner}", f"{cls.__name__} is not an attrs class", "decorate it with attrs.frozen"
        )
    hints = typing.get_type_hints(cls)
    fields = []
    for attribute in attrs.fields(cls):
        meta = attribute.metadata.get(_META)
        if meta is None or attribute.default is attrs.NOTHING:
            raise PluginError(
                f"options of {spec.owner}", f"{cls.__name__}.{attribute.name} has no default or help text",
                "make every field with freetoken.option(default, help=...)",
            )  # fmt: skip
        fields.append(OptionField(spec.owner, attribute.name, hints[attribute.name], attribute.default, meta))
    return tuple(fields)
