"""How one of several offers is picked: filter by facts and probes, rank, ask ``freetoken_choose``, keep the reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from attrs import frozen

from freetoken.plugin.catalog import Catalog, Catalogs, Offer, offer_key
from freetoken.plugin.specs import Candidate
from freetoken.vocab.availability import Availability
from freetoken.vocab.errors import OptionError, RefusedPlan
from freetoken.vocab.hardware import Device, Hardware
from freetoken.vocab.kinds import OfferKind
from freetoken.vocab.ops import OPS
from freetoken.vocab.plan import CandidateNote, Choice

S = TypeVar("S")
Chooser = Callable[[str, str, Sequence[Candidate], Hardware], str]
Prober = Callable[[Any], Availability]


@frozen
class Surroundings:
    """What every choice looks at: the offers, the machine, the probes' answers and the hook that picks."""

    catalogs: Catalogs
    hardware: Hardware
    device: Device
    choose: Chooser
    probe: Prober


def pick(
    around: Surroundings,
    catalog: Catalog[S],
    asked: str,
    subject: str,
    fits: Callable[[S], Availability],
    *,
    offers: Sequence[Offer[S]] | None = None,
) -> tuple[S, Choice]:
    """The offer called ``asked``, or for ``"auto"`` the best that fits.

    Raises ``MissingPlugin`` or ``UsageError`` for an unknown name, ``RefusedPlan`` when the named one does not fit or
    nothing does; the text lists every candidate with its reason.
    """
    candidates = tuple(offers) if offers is not None else catalog.ranked()
    by_name: dict[str, Offer[S]] = {getattr(o.spec, "name"): o for o in candidates}  # noqa: B009
    if asked != "auto" and asked not in by_name:
        _refuse_unknown(catalog, asked, by_name)
    verdicts = {name: _verdict(around, offer.spec, fits) for name, offer in by_name.items()}
    kind = catalog.kind
    if asked != "auto":
        if not verdicts[asked]:
            answer = verdicts[asked]
            others = ", ".join(name for name, verdict in verdicts.items() if verdict)
            fix = answer.fix or (f"use one that fits: {others}" if others else "see `freetoken plugins --all`")
            raise RefusedPlan(f"{kind.option} {asked}{_for(subject)}", answer.reason, fix)
        name, because = asked, "asked for"
    else:
        name, because = _best(around, kind, subject, by_name, verdicts)
    rankings = {n: str(getattr(offer.spec, "ranking", "")) for n, offer in by_name.items()}
    notes = tuple(CandidateNote(n, bool(v), _note(n, name, v, rankings[n])) for n, v in verdicts.items())
    return by_name[name].spec, Choice(kind.word, subject, name, because, notes)


def _refuse_unknown(catalog: Catalog[Any], asked: str, known: Mapping[str, Offer[Any]]) -> None:
    if catalog.names() == tuple(known):
        catalog.refuse(asked)
    keys = [offer_key(offer.spec) for offer in known.values()]
    prefix = keys[0].removesuffix(next(iter(known)))  # "rope=" of "rope=torch"
    raise OptionError(
        f"{catalog.kind.option} {prefix}{asked}", f"no such {catalog.kind.word}", f"use one of: {', '.join(keys)}"
    )


def _verdict(around: Surroundings, spec: Any, fits: Callable[[Any], Availability]) -> Availability:
    devices = getattr(spec, "devices", None)
    if devices is not None and around.device.kind not in devices:
        return Availability.no(f"it runs on {', '.join(sorted(devices))}, not on {around.device.kind}")
    return fits(spec) and around.probe(spec)


def _best(
    around: Surroundings,
    kind: OfferKind,
    subject: str,
    by_name: Mapping[str, Offer[Any]],
    verdicts: Mapping[str, Availability],
) -> tuple[str, str]:
    fitting = [Candidate(n, getattr(o.spec, "priority", 0), o.spec.summary) for n, o in by_name.items() if verdicts[n]]
    if not fitting:
        reasons = "; ".join(f"{n}: {v.reason}" for n, v in verdicts.items()) or "none is installed"
        fixes = dict.fromkeys(v.fix for v in verdicts.values() if v.fix)
        fix = "; or ".join(fixes) or "see `freetoken plugins --all`"
        raise RefusedPlan(f"{kind.word}{_for(subject)}", f"nothing fits: {reasons}", fix)
    name = around.choose(kind.word, subject, fitting, around.hardware)
    if len(fitting) == 1:
        return name, "the only one that fits"
    if name == fitting[0].name:
        return name, f"highest priority ({fitting[0].priority}) of {len(fitting)} that fit"
    return name, "picked by a plugin"


def _note(name: str, chosen: str, verdict: Availability, ranking: str) -> str:
    why = f": {ranking}" if ranking else ""
    if name == chosen:
        return "chosen" + why
    return f"fits, ranked lower{why}" if verdict else verdict.reason + (f" → {verdict.fix}" if verdict.fix else "")


def _for(subject: str) -> str:
    return f" for {subject}" if subject else ""


def kernel_overrides(words: Sequence[str]) -> dict[str, str]:
    """``("rope=torch",)`` → ``{"rope": "torch"}``; ``OptionError`` for an unknown op."""
    overrides = {}
    for word in words:
        op, separator, name = word.partition("=")
        if not separator or not name:
            raise OptionError(f"--kernel {word}", "it does not read OP=NAME", "write for example --kernel linear=torch")
        if op not in OPS:
            raise OptionError(f"--kernel {word}", f"no op is called {op!r}", f"ops are {', '.join(OPS)}")
        overrides[op] = name
    return overrides
