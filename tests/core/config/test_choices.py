"""One of several offers is picked: facts, probes, rank, the deciding hook. Oracle: the rules, on offers made here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from freetoken.builtin import BUILTINS
from freetoken.config.choices import Chooser, Surroundings, kernel_overrides, pick
from freetoken.plugin.catalog import Catalog, Catalogs, Offer
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.selection import Selection
from freetoken.plugin.specs import Candidate, WarmupPolicySpec
from freetoken.vocab import kinds
from freetoken.vocab.availability import Availability
from freetoken.vocab.errors import MissingPlugin, OptionError, RefusedPlan, UsageError
from freetoken.vocab.hardware import Device, Hardware
from freetoken.vocab.plan import Choice

CATALOGS = build_plugins(Selection(), BUILTINS).catalogs
GPU = Device(kind="cuda", name="a card")


YES = Availability.yes()


@frozen(kw_only=True)
class Thing:
    """An offer with what every spec has."""

    name: str
    priority: int = 0
    summary: str = "a thing"
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    works: Availability = YES
    ranking: str = ""


def first(kind: str, subject: str, candidates: Sequence[Candidate], hardware: Hardware) -> str:
    return candidates[0].name


def around(device: Device = GPU, choose: Chooser = first, catalogs: Catalogs = CATALOGS) -> Surroundings:
    return Surroundings(catalogs, Hardware(accelerators=(GPU,)), device, choose, lambda thing: thing.works)


def catalog(*things: Thing) -> Catalog[Thing]:
    return Catalog(kinds.ATTENTION_BACKEND, {t.name: Offer(t, f"{t.name}-plugin") for t in things})


def fits_all(_: Thing) -> Availability:
    return Availability.yes()


def picked(*things: Thing, asked: str = "auto", where: Surroundings | None = None) -> Choice:
    return pick(where or around(), catalog(*things), asked, "layers", fits_all)[1]


def why(choice: Choice) -> dict[str, str]:
    return {note.name: note.why for note in choice.candidates}


@given(things=st.lists(st.builds(Thing, name=st.text("abc", min_size=1), priority=st.integers(-2, 2)), min_size=1,
                       max_size=6, unique_by=lambda t: t.name), seed=st.randoms())  # fmt: skip
def test_the_order_of_registration_never_matters(things: list[Thing], seed: object) -> None:
    """Oracle: highest priority, ties by name, whatever the order."""
    shuffled = list(things)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    best = min(things, key=lambda t: (-t.priority, t.name))
    choice = picked(*shuffled)
    assert choice.name == best.name
    assert choice == picked(*things)


def test_every_candidate_has_its_reason() -> None:
    no = Availability.no("its library is missing", "pip install it")
    choice = picked(
        Thing(name="best", priority=9), Thing(name="next"), Thing(name="broken", priority=10, works=no),
        Thing(name="elsewhere", devices=frozenset({"cpu"})),
    )  # fmt: skip
    assert (choice.name, choice.because) == ("best", "highest priority (9) of 2 that fit")
    assert why(choice) == {
        "best": "chosen", "next": "fits, ranked lower", "broken": "its library is missing → pip install it",
        "elsewhere": "it runs on cpu, not on cuda",
    }  # fmt: skip
    assert {n.name: n.fits for n in choice.candidates}["broken"] is False


def test_what_a_rank_rests_on_is_said() -> None:
    """Oracle: the offers' own words, on the one that is chosen and on the one that is passed over."""
    choice = picked(Thing(name="a", priority=2, ranking="twice as fast"), Thing(name="b", ranking="not measured"))
    assert why(choice) == {"a": "chosen: twice as fast", "b": "fits, ranked lower: not measured"}


def test_one_that_was_asked_for_and_does_not_fit_names_those_that_do() -> None:
    there, elsewhere = Thing(name="there"), Thing(name="elsewhere", devices=frozenset({"cpu"}))
    with pytest.raises(RefusedPlan, match="it runs on cpu, not on cuda") as caught:
        picked(there, elsewhere, asked="elsewhere")
    assert caught.value.refusal.fix == "use one that fits: there"
    with pytest.raises(RefusedPlan) as caught:
        picked(elsewhere, asked="elsewhere")
    assert caught.value.refusal.fix == "see `freetoken plugins --all`"


def test_the_only_one_is_called_that() -> None:
    assert picked(Thing(name="one"), Thing(name="x", devices=frozenset())).because == "the only one that fits"


def test_a_plugin_may_decide_among_those_that_fit() -> None:
    seen: list[str] = []

    def last(kind: str, subject: str, candidates: Sequence[Candidate], hardware: Hardware) -> str:
        seen.extend(c.name for c in candidates)
        return candidates[-1].name

    unfit = Thing(name="unfit", priority=99, works=Availability.no("no"))
    choice = picked(Thing(name="a", priority=1), Thing(name="b"), unfit, where=around(choose=last))
    assert (choice.name, choice.because) == ("b", "picked by a plugin")
    assert seen == ["a", "b"]
    assert why(choice)["a"] == "fits, ranked lower"


def test_a_name_that_was_asked_for_beats_priority() -> None:
    choice = picked(Thing(name="a", priority=5), Thing(name="b"), asked="b")
    assert (choice.name, choice.because) == ("b", "asked for")


def test_an_asked_one_that_does_not_fit_is_refused_with_its_reason_and_fix() -> None:
    no = Availability.no("its library is missing", "pip install it")
    with pytest.raises(RefusedPlan) as refused:
        picked(Thing(name="a"), Thing(name="b", works=no), asked="b")
    assert refused.value.refusal.asked == "--attention-backend b for layers"
    assert (refused.value.refusal.found, refused.value.refusal.fix) == ("its library is missing", "pip install it")


def test_when_nothing_fits_every_reason_and_every_fix_is_listed() -> None:
    with pytest.raises(RefusedPlan) as refused:
        picked(
            Thing(name="a", works=Availability.no("too small", "buy a larger one")),
            Thing(name="b", devices=frozenset({"cpu"})),
        )
    text = str(refused.value)
    for part in ("nothing fits", "a: too small", "b: it runs on cpu, not on cuda", "buy a larger one"):
        assert part in text


def test_when_nothing_is_installed_that_is_said() -> None:
    with pytest.raises(RefusedPlan, match="none is installed"):
        picked()


def test_an_unknown_name_lists_the_known_and_a_known_package_its_pip_line() -> None:
    with pytest.raises(UsageError, match="use one of: auto, a"):
        picked(Thing(name="a"), asked="zzz")
    with pytest.raises(MissingPlugin, match="pip install freetoken-attention-flashinfer"):
        picked(Thing(name="a"), asked="flashinfer")


def test_an_override_that_names_no_kernel_of_the_op_lists_those_of_the_op() -> None:
    offers = CATALOGS.kernels.ranked(lambda k: k.op == "rope")
    with pytest.raises(OptionError) as refused:
        pick(around(), CATALOGS.kernels, "nothing", "rope", fits_all, offers=offers)
    assert refused.value.refusal.asked == "--kernel rope=nothing"
    assert "rope=torch" in refused.value.refusal.fix
    assert "linear" not in str(refused.value)


def test_reasons_do_not_depend_on_the_chooser_seeing_them() -> None:
    """Adding an unfit offer changes nothing but the list."""
    plain = picked(Thing(name="a"))
    more = picked(Thing(name="a"), Thing(name="z", works=Availability.no("no")))
    assert evolve(more, candidates=()) == evolve(plain, candidates=())


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("rope", "OP=NAME"),
        ("rope=", "OP=NAME"),
        ("=torch", "no op is called ''"),
        ("ropes=torch", "'ropes'(.|\n)*ops are .*rope"),
    ],
)
def test_a_kernel_word_that_cannot_be_read_says_how_it_must_look(word: str, part: str) -> None:
    with pytest.raises(OptionError, match=part) as refused:
        kernel_overrides((word,))
    assert word in refused.value.refusal.asked


def test_the_last_word_about_an_op_counts() -> None:
    assert kernel_overrides(("rope=a", "sample=b", "rope=c")) == {"rope": "c", "sample": "b"}


def test_warmup_policies_have_no_devices_and_are_picked_all_the_same() -> None:
    """A spec without ``devices`` runs anywhere."""
    spec = WarmupPolicySpec(name="p", summary="", create=lambda _: None)  # type: ignore[arg-type,return-value]
    where = evolve(around(), probe=lambda _: Availability.yes())
    offers = Catalog(kinds.WARMUP_POLICY, {"p": Offer(spec, "x")})
    assert pick(where, offers, "auto", "", lambda _: Availability.yes())[1].name == "p"
