"""Options are fields. Oracles: a round trip through every source, and hand-made rows."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.plugin.options import OptionField, option, option_fields
from freetoken.plugin.specs import OptionsSpec
from freetoken.vocab.errors import OptionError, PluginError


@attrs.frozen
class Sample:
    slots: int | None = option(None, help="slots", low=1, high=512)
    share: float = option(0.5, help="share", low=0, high=1)
    policy: str = option("lru", help="policy", choices=("lru", "lfu-decay"))
    memory: int | None = option(None, help="memory", unit="bytes")
    eager: bool = option(False, help="eager", aliases=("--hurry", "HURRY_UP"))
    names: tuple[str, ...] = option((), help="names", repeated=True)


FIELDS = {f.name: f for f in option_fields(OptionsSpec(owner="moe-offload", cls=Sample))}


def test_every_name_is_derived() -> None:
    eager = FIELDS["eager"]
    assert eager.flags == ("--moe-offload-eager", "--hurry")
    assert eager.variables == ("FREETOKEN_MOE_OFFLOAD_EAGER", "HURRY_UP")
    assert eager.file_key == "moe-offload.eager"


def test_the_cores_names_have_no_prefix() -> None:
    field = option_fields(OptionsSpec(owner="core", cls=Sample))[0]
    assert (field.flag, field.variables, field.file_key) == ("--slots", ("FREETOKEN_SLOTS",), "slots")


@given(st.integers(1, 512))
def test_integers_survive_text(value: int) -> None:
    assert FIELDS["slots"].read(str(value), "x") == value == FIELDS["slots"].read(value, "x")


@given(st.floats(0, 1, allow_nan=False))
def test_floats_survive_text(value: float) -> None:
    assert FIELDS["share"].read(repr(value), "x") == value


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("slots", "auto", None),
        ("memory", "1.5 GiB", 1610612736),
        ("memory", 4096, 4096),
        ("eager", "yes", True),
        ("eager", "0", False),
        ("names", "a, b", ("a", "b")),
        ("names", ["a", "b"], ("a", "b")),
    ],
)
def test_reading(name: str, raw: object, value: object) -> None:
    assert FIELDS[name].read(raw, "x") == value


@pytest.mark.parametrize(
    ("name", "raw", "text"),
    [
        ("slots", "0", "at least 1"),
        ("slots", "513", "at most 512"),
        ("slots", "many", "invalid literal"),
        ("slots", 1.5, "not a whole number"),
        ("slots", True, "not a whole number"),
        ("share", "2", "at most 1"),
        ("policy", "fifo", "lru, lfu-decay"),
        ("memory", "a lot", "KiB, MiB or GiB"),
        ("eager", "perhaps", "neither true nor false"),
        ("names", [1], "not a list of names"),
        ("policy", ["lru"], "not text"),
    ],
)
def test_refusals_name_origin_and_remedy(name: str, raw: object, text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        FIELDS[name].read(raw, "FREETOKEN_X")
    assert "FREETOKEN_X" in str(caught.value)


def test_a_class_without_helps_or_defaults_is_refused() -> None:
    @attrs.frozen
    class Bare:
        x: int = 3

    with pytest.raises(PluginError, match=r"Bare\.x has no default or help"):
        option_fields(OptionsSpec(owner="o", cls=Bare))
    with pytest.raises(PluginError, match="not an attrs class"):
        option_fields(OptionsSpec(owner="o", cls=int))


def test_fields_are_values() -> None:
    assert isinstance(FIELDS["slots"], OptionField)
    assert hash(FIELDS["slots"]) == hash(FIELDS["slots"])
