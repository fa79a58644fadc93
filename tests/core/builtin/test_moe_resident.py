"""The resident experts: the conformance suite, and the budget to the byte."""

from __future__ import annotations

import pytest
import torch

from freetoken.builtin.kernels_torch import expert_layout
from freetoken.builtin.moe_resident import ResidentExperts, budget
from freetoken.ops.experts import experts
from freetoken.plugin.protocols import ExpertLayer, MoESetup
from freetoken.testing.moe import MoEConformance
from freetoken.vocab.errors import EngineError
from freetoken.vocab.hardware import Device
from freetoken.vocab.model_spec import MoEShape
from freetoken.vocab.ops import OpShape


class TestConformance(MoEConformance):
    spec = "freetoken.builtin.moe_resident:freetoken_moe_strategies"
    shares = (1.0,)


def setup(call: object = experts) -> MoESetup:
    shape = MoEShape((0, 2), experts=4, top_k=2, hidden=16, intermediate=8)
    layout = expert_layout(OpShape("experts", "float32", cols=16, intermediate=8))
    layers = tuple(ExpertLayer(n, layout, call) for n in shape.layers)  # type: ignore[arg-type]
    return MoESetup(shape, layers, Device(), "float32", 8, 2, 1 << 30, 1 << 30)


def packed() -> dict[str, torch.Tensor]:
    return {"gate_up": torch.ones(16, 16), "down": torch.ones(16, 8)}


def test_budget_is_exact() -> None:
    """Oracle: the bytes of the banks that the strategy really holds."""
    strategy = ResidentExperts(setup())
    held = sum(t.untyped_storage().nbytes() for bank in strategy._banks.values() for t in bank.values())
    assert sum(claim.steady_bytes for claim in budget(setup())) == held == 2 * 4 * 3 * 16 * 8 * 4


@pytest.mark.parametrize(
    ("layer", "expert", "parts", "told"),
    [
        (1, 0, packed(), r"layers \[0, 2\]"),
        (0, 4, packed(), "4 experts"),
        (0, 0, {"gate_up": torch.ones(16, 16)}, "declared"),
        (0, 0, {**packed(), "down": torch.ones(16, 8).bfloat16()}, "bfloat16"),
        (0, 0, {**packed(), "down": torch.ones(8, 16)}, r"8, 16"),
    ],
)
def test_a_wrong_expert_is_refused(layer: int, expert: int, parts: dict[str, torch.Tensor], told: str) -> None:
    """Oracle: the layout that the kernel declared; the message says what is true."""
    with pytest.raises(EngineError, match=told):
        ResidentExperts(setup()).accept(layer, expert, parts)


def test_nothing_comes_after_the_seal() -> None:
    """Oracle: the contract of ``seal``."""
    strategy = ResidentExperts(setup())
    for layer in (0, 2):
        for expert in range(4):
            strategy.accept(layer, expert, packed())
    strategy.seal()
    with pytest.raises(EngineError, match="sealed"):
        strategy.accept(0, 0, packed())


def test_the_fill_is_counted() -> None:
    """Oracle: the bytes of one expert."""
    strategy = ResidentExperts(setup())
    strategy.accept(0, 1, packed())
    assert strategy.stats().moved_bytes["fill"] == 3 * 16 * 8 * 4


def test_a_planned_strategy_cannot_compute() -> None:
    """Oracle: the contract of ``ExpertLayer.call``, which is ``None`` at plan time."""
    strategy = ResidentExperts(setup(None))
    with pytest.raises(EngineError, match="bound call"):
        strategy.start(0, torch.ones(1, 16), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32))
