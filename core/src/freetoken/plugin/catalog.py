"""What is on offer, by kind and name, each with its owner; independent of the order in which plugins were loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar, cast

from attrs import field, frozen

from freetoken.plugin import specs
from freetoken.plugin.distributions import install_hint
from freetoken.vocab import kinds
from freetoken.vocab.errors import MissingPlugin, UsageError

S = TypeVar("S")


@frozen
class Offer(Generic[S]):
    """A spec and the plugin that offers it."""

    spec: S
    owner: str


def offer_key(spec: object) -> str:
    """The name under which an offer must be unique within its kind."""
    if isinstance(spec, specs.KernelSpec):
        return f"{spec.op}={spec.name}"
    if isinstance(spec, specs.OptionsSpec):
        return spec.owner
    return cast(str, getattr(spec, "name"))  # noqa: B009  (every other spec has a name; kinds are checked on load)


@frozen
class Catalog(Generic[S]):
    """All offers of one kind, ranked: highest priority first, ties by name."""

    kind: kinds.OfferKind
    offers: Mapping[str, Offer[S]] = field(factory=dict)
    failures: Mapping[str, str] = field(factory=dict)  # plugin → why it failed, for the message of a missing name

    def __iter__(self) -> Iterator[S]:
        return (offer.spec for offer in self.ranked())

    def __len__(self) -> int:
        return len(self.offers)

    def ranked(self, fits: Callable[[S], bool] = lambda _: True) -> tuple[Offer[S], ...]:
        """Offers that fit, best first."""
        chosen = [o for o in self.offers.values() if fits(o.spec)]
        return tuple(sorted(chosen, key=lambda o: (-getattr(o.spec, "priority", 0), offer_key(o.spec))))

    def names(self) -> tuple[str, ...]:
        return tuple(offer_key(o.spec) for o in self.ranked())

    def get(self, name: str) -> S:
        """The spec called ``name``; ``MissingPlugin`` with the ``pip install`` line, else ``UsageError``."""
        offer = self.offers.get(name)
        if offer is not None:
            return offer.spec
        self.refuse(name)
        raise AssertionError("refuse always raises")

    def refuse(self, name: str) -> None:
        """Raise the error that fits an unknown ``name``."""
        asked = f"{self.kind.option or self.kind.word} {name}"
        known = ", ".join(("auto", *self.names()) if self.kind.option else self.names())
        hint = install_hint(self.kind.hook, name)
        if hint is not None:
            broken = self.failures.get(hint.plugin)
            if broken is not None:
                raise UsageError(
                    asked, f"{hint.distribution} is installed but its plugin did not load: {broken}",
                    f"pip install --force-reinstall {hint.distribution}",
                )  # fmt: skip
            raise MissingPlugin(
                asked, f"no installed plugin offers it (installed: {known})", f"pip install {hint.distribution}"
            )
        raise UsageError(asked, f"no installed plugin offers this {self.kind.word}", f"use one of: {known}")

    def owner(self, name: str) -> str:
        return self.offers[name].owner


@frozen
class Catalogs:
    """Every kind's catalog."""

    attention_backends: Catalog[specs.AttentionBackendSpec]
    moe_strategies: Catalog[specs.MoEStrategySpec]
    kernels: Catalog[specs.KernelSpec]
    warmup_policies: Catalog[specs.WarmupPolicySpec]
    model_families: Catalog[specs.ModelFamilySpec]
    weight_formats: Catalog[specs.WeightFormatSpec]
    options: Catalog[specs.OptionsSpec]

    def kernels_for(self, op: str) -> tuple[specs.KernelSpec, ...]:
        """Implementations of one op, best first."""
        return tuple(o.spec for o in self.kernels.ranked(lambda k: k.op == op))
