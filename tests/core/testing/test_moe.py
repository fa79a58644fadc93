"""The MoE suite catches the faults it is there for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from attrs import evolve
from torch import Tensor

from freetoken.builtin.moe_resident import ResidentExperts, freetoken_moe_strategies
from freetoken.plugin.protocols import Pending
from freetoken.testing.moe import MoECase, MoEConformance

(SPEC,) = freetoken_moe_strategies()


class KeepsReferences(ResidentExperts):
    def accept(self, layer: int, expert: int, packed: Mapping[str, Tensor]) -> None:
        super().accept(layer, expert, packed)
        self.late = {**getattr(self, "late", {}), (layer, expert): packed}

    def seal(self) -> None:
        super().seal()

    def start(self, layer: int, hidden: Tensor, weights: Tensor, experts: Tensor) -> Pending:
        for (where, expert), packed in self.late.items():
            for name, part in packed.items():
                self._banks[where][name][expert].copy_(part)
        return super().start(layer, hidden, weights, experts)


class OnePending(ResidentExperts):
    """A second start overwrites the first's result."""

    def start(self, layer: int, hidden: Tensor, weights: Tensor, experts: Tensor) -> Pending:
        self.newest = super().start(layer, hidden, weights, experts)
        return "pending"

    def finish(self, pending: Pending) -> Tensor:
        return super().finish(self.newest)


class RehearsesForReal(ResidentExperts):
    @contextmanager
    def rehearse(self) -> Iterator[None]:
        for bank in self._banks.values():
            for part in bank.values():
                part.mul_(1.5)
        yield


class TakesTwice(ResidentExperts):
    def accept(self, layer: int, expert: int, packed: Mapping[str, Tensor]) -> None:
        self._accepted.discard((layer, expert))
        super().accept(layer, expert, packed)


class NeverMisses(ResidentExperts):
    def seal(self) -> None:
        self._sealed = True


class TakesMore(ResidentExperts):
    def seal(self) -> None:
        super().seal()
        self.spare = torch.zeros(1 << 20)


class SwapsLayers(ResidentExperts):
    def start(self, layer: int, hidden: Tensor, weights: Tensor, experts: Tensor) -> Pending:
        other = next(n for n in self._banks if n != layer)
        return super().start(other, hidden, weights, experts)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (KeepsReferences, "test_accept_copies"),
        (OnePending, "test_several_pendings_may_be_open"),
        (RehearsesForReal, "test_rehearsal_leaves_no_trace"),
        (TakesTwice, "test_an_expert_comes_once"),
        (NeverMisses, "test_seal_names_the_first_missing_expert"),
        (TakesMore, "test_the_budget_holds"),
        (SwapsLayers, "test_equals_the_dense_sum"),
        (SwapsLayers, "test_every_expert_is_reachable"),
    ],
)
def test_a_fault_is_caught(broken: type[ResidentExperts], test: str) -> None:
    """Oracle: the same test passes for the resident strategy, and fails for the broken one."""
    suite, good = MoEConformance(), MoECase(SPEC, "cpu", "float32", 1.0)
    getattr(suite, test)(good)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(suite, test)(evolve(good, spec=evolve(SPEC, create=broken)))


def test_a_share_that_does_not_fit_is_skipped_but_the_first_is_not() -> None:
    """Oracle: resident experts need all of their memory."""
    suite = MoEConformance()
    with pytest.raises(pytest.skip.Exception, match="wants"):
        suite.test_an_expert_comes_once(MoECase(SPEC, "cpu", "float32", 0.25))
    greedy = evolve(SPEC, budget=lambda setup: tuple(evolve(c, peak_bytes=1 << 40) for c in SPEC.budget(setup)))
    with pytest.raises(AssertionError, match="wanted"):
        suite.test_an_expert_comes_once(MoECase(greedy, "cpu", "float32", 1.0))
