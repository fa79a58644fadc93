"""Which plugins the user wants: required by name, blocked by ``no:NAME``; everything else loads if it can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen

from freetoken.vocab.errors import OptionError


@frozen
class Selection:
    """``required`` plugins end the start when they fail; ``blocked`` ones are not even imported."""

    required: frozenset[str] = field(factory=frozenset)
    blocked: frozenset[str] = field(factory=frozenset)

    @classmethod
    def of(cls, words: Iterable[str]) -> Selection:
        """From words such as ``"mine"`` and ``"no:theirs"``; a later word about the same plugin wins."""
        wanted: dict[str, bool] = {}
        for word in words:
            name = word.strip()
            if name.startswith("no:"):
                wanted[name[3:]] = False
            elif name:
                wanted[name] = True
        return cls(
            required=frozenset(n for n, yes in wanted.items() if yes),
            blocked=frozenset(n for n, yes in wanted.items() if not yes),
        )


def selection_words(flags: Iterable[str], variable: str, table: Mapping[str, object]) -> tuple[str, ...]:
    """The words of all three sources, weakest first: the file's ``[plugins]``, ``FREETOKEN_PLUGINS``, ``--plugin``."""
    unknown = set(table) - {"require", "block"}
    if unknown:
        raise OptionError(
            f"[plugins] {', '.join(sorted(unknown))} in freetoken.toml",
            "the section takes require and block",
            "an option of a plugin goes into a section of the plugin's own name",
        )
    words = [*_names(table, "require"), *(f"no:{n}" for n in _names(table, "block"))]
    words += [w for w in variable.split(",") if w.strip()]
    for flag in flags:
        words += [w for w in flag.split(",") if w.strip()]
    return tuple(words)


def _names(table: Mapping[str, object], key: str) -> list[str]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(n, str) for n in value):
        raise OptionError(
            f"[plugins] {key} = {value!r} in freetoken.toml", "it must be a list of plugin names",
            f'write for example {key} = ["warmup-ladder"]',
        )  # fmt: skip
    return value
