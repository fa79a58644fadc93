"""Merges the three sources of options: ``freetoken.toml``, the environment, the command line; later ones win."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar, cast

import cattrs
from attrs import field, frozen

from freetoken.plugin.catalog import Catalog
from freetoken.plugin.distributions import flag_hint
from freetoken.plugin.manager import PluginRecord
from freetoken.plugin.options import CORE_OWNER, OptionField, option_fields
from freetoken.plugin.specs import OptionsSpec
from freetoken.vocab.errors import OptionError
from freetoken.vocab.plan import OptionValue

# Variables that are read, but are not options of an owner.
RESERVED_VARIABLES = frozenset({"FREETOKEN_PLUGINS", "FREETOKEN_CONFIG", "FREETOKEN_DEPENDENT_LAUNCH"})
_SECRET = frozenset({"api_key"})
T = TypeVar("T")


@frozen
class FlagValue:
    """A flag as given on the command line, with its raw value (text, ``True`` or ``False``)."""

    flag: str
    raw: object


@frozen
class Settings:
    """Every option's value with its origin, and the warnings met on the way."""

    values: Mapping[tuple[str, str], OptionValue]
    warnings: tuple[str, ...] = ()

    def of(self, spec: OptionsSpec) -> object:
        """The options of one owner as an instance of its class."""
        values = {name: v.value for (owner, name), v in self.values.items() if owner == spec.owner}
        return options_instance(spec.cls, values)

    def core(self, cls: type[T]) -> T:
        values = {name: v.value for (owner, name), v in self.values.items() if owner == CORE_OWNER}
        return cast(T, options_instance(cls, values))

    def with_value(self, owner: str, name: str, value: object, origin: str) -> Settings:
        """The same settings with one value set by something stronger, such as a positional argument."""
        values = {**self.values, (owner, name): OptionValue(owner, name, value, origin)}
        return Settings(values, self.warnings)

    @property
    def public_values(self) -> tuple[OptionValue, ...]:
        """For printing and for the plan's page: secrets are left out."""
        return tuple(v for v in self.values.values() if v.name not in _SECRET)


def options_instance(cls: type, values: Mapping[str, object]) -> object:
    """An option class made from plain values; cattrs checks them against the declared types."""
    return _CONVERTER.structure(dict(values), cls)


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    # Values were read and typed by OptionField; structuring must not turn "12" into 12 behind its back.
    for kind in (int, float, str, bool):
        converter.register_structure_hook(kind, lambda value, _: value)
    return converter


_CONVERTER = _make_converter()


@frozen
class OptionTable:
    """Every option there is, looked up by flag, variable or file key."""

    fields: tuple[OptionField, ...]
    by_flag: Mapping[str, OptionField] = field(factory=dict)
    by_variable: Mapping[str, OptionField] = field(factory=dict)
    by_key: Mapping[str, OptionField] = field(factory=dict)

    @classmethod
    def of(cls, options: Catalog[OptionsSpec]) -> OptionTable:
        fields = tuple(f for offer in options.ranked() for f in option_fields(offer.spec))
        return cls(
            fields=fields,
            by_flag={flag: f for f in fields for flag in f.flags},
            by_variable={name: f for f in fields for name in f.variables},
            by_key={f.file_key: f for f in fields},
        )


def merge(
    table: OptionTable,
    *,
    flags: Iterable[FlagValue],
    environment: Mapping[str, str],
    file: Mapping[str, object],
    file_name: str,
    records: Mapping[str, PluginRecord],
) -> Settings:
    """Defaults, then file, environment and flags. Raises ``OptionError``; unknown variables only warn."""
    values = {
        (f.owner, f.name): OptionValue(f.owner, f.name, f.default, "default") for f in table.fields
    }  # fmt: skip
    for key, raw in _flattened(file).items():
        option = table.by_key.get(key)
        if option is None:
            _refuse_key(key, table, file_name, records)
        else:
            _set(values, option, raw, f"{file_name}: {key}")
    warnings = []
    for name, text in sorted(environment.items()):
        if option := table.by_variable.get(name):
            _set(values, option, text, name)
        elif name.startswith("FREETOKEN_") and name not in RESERVED_VARIABLES:
            warnings.append(_unknown_variable(name, table))
    gathered: dict[OptionField, list[str]] = {}
    for given in flags:
        option = table.by_flag[given.flag]
        if option.meta.repeated:
            gathered.setdefault(option, []).append(str(given.raw))
            _set(values, option, gathered[option], given.flag)
        else:
            _set(values, option, given.raw, given.flag)
    return Settings(values, tuple(warnings))


def _set(values: dict[tuple[str, str], OptionValue], option: OptionField, raw: object, origin: str) -> None:
    value = option.read(raw, origin)
    values[(option.owner, option.name)] = OptionValue(option.owner, option.name, value, origin)


def _flattened(file: Mapping[str, object]) -> dict[str, object]:
    """Top-level keys are the core's; a table is an owner's section. ``[plugins]`` was read in the first pass."""
    flat: dict[str, object] = {}
    for key, value in file.items():
        if key == "plugins":
            continue
        if isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": v for inner, v in value.items()} or {f"{key}.": None})
        else:
            flat[key] = value
    return {k: v for k, v in flat.items() if not k.endswith(".")}


def _refuse_key(key: str, table: OptionTable, file_name: str, records: Mapping[str, PluginRecord]) -> None:
    section = key.partition(".")[0] if "." in key else ""
    asked = f"{key} in {file_name}"
    record = records.get(section)
    if record is not None and record.state != "active":
        raise OptionError(
            asked, f"the plugin {section} is {record.state}: {record.reason or 'by your selection'}",
            f"take the section [{section}] out, or let the plugin load",
        )  # fmt: skip
    if section:
        known = [k for k in table.by_key if k.startswith(f"{section}.")]
    else:
        known = [k for k in table.by_key if "." not in k]
    sections = sorted({k.partition(".")[0] for k in table.by_key if "." in k})
    if section and not known:
        raise OptionError(asked, f"no such section, and no plugin {section}", _sections(sections))
    close = _closest(key, table.by_key) or "take it out, or see docs/options.md"
    raise OptionError(asked, f"unknown key; known: {', '.join(known)}", close)


def _sections(names: Iterable[str]) -> str:
    return f"sections are: {', '.join(names) or 'none'}"


def _unknown_variable(name: str, table: OptionTable) -> str:
    if hint := flag_hint(name):
        return (
            f"{name} is set, but {hint.distribution}, which reads it, is not active (pip install {hint.distribution})"
        )
    close = _closest(name, table.by_variable)
    return f"{name} is set, but nothing reads it" + (f"; {close}" if close else "")


def refuse_flag(flag: str, table: OptionTable) -> None:
    """Raise the error for an unknown ``flag``: the package that would bring it, or the closest known flags."""
    if hint := flag_hint(flag):
        raise OptionError(flag, f"unknown flag; {hint.distribution} would bring it", f"pip install {hint.distribution}")
    close = get_close_matches(flag, table.by_flag, n=3, cutoff=0.5)
    listed = ", ".join(close) if close else ", ".join(sorted(table.by_flag))
    raise OptionError(flag, f"unknown flag; {'close' if close else 'known'} ones: {listed}", "see --help for all")


def _closest(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


def read_config_file(path: str | None) -> tuple[dict[str, object], str]:
    """The parsed ``freetoken.toml`` and its name; an explicit ``path`` must exist, the default one may be absent."""
    target = Path(path) if path is not None else Path("freetoken.toml")
    if path is None and not target.is_file():
        return {}, str(target)
    try:
        return tomllib.loads(target.read_text(encoding="utf-8")), str(target)
    except FileNotFoundError:
        raise OptionError(f"--config {path}", "no such file", "check the path, or leave --config out") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise OptionError(f"{target}", f"it cannot be read: {error}", "correct it; it is TOML in UTF-8") from None
