"""What every MoE strategy must do, as a test class that a plugin's author subclasses.

    class TestMine(MoEConformance):
        spec = "my_package.plugin:SPEC"

Experts are packed and computed by the built-in reference kernel; the strategy decides where they live.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from itertools import product

import pytest
import torch
from attrs import field, frozen
from torch import Tensor

from freetoken.builtin.kernels_torch import expert_layout
from freetoken.ops.experts import experts as reference_experts
from freetoken.plugin.protocols import ExpertLayer, MoESetup, MoEStrategy
from freetoken.plugin.specs import MoEStrategySpec
from freetoken.testing.fakes import device_kinds, device_marks, load_specs, make_batch, make_device, normal
from freetoken.testing.tolerances import assert_close
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.errors import CheckpointError, FreeTokenError
from freetoken.vocab.model_spec import MoEShape
from freetoken.vocab.ops import OpShape

Expert = dict[str, Tensor]


@frozen
class MoECase:
    """A strategy on a device, in a dtype, with device memory for a share of the experts."""

    spec: MoEStrategySpec = field(eq=False)
    device: str
    dtype: str
    share: float

    def __str__(self) -> str:
        return f"{self.spec.name}-{self.device}-{self.dtype}-{self.share:.0%}"


class MoEConformance:
    """Subclass as ``TestSomething`` and set ``spec``.

    ``shares`` are the parts of all experts that fit the device; a share that the strategy's budget exceeds is skipped,
    except the first, which every strategy must fit within ``headroom_bytes`` more than the experts. It may take
    ``overhead_bytes`` beyond what it declared: the allocator rounds.
    """

    spec: str
    devices: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    shares: tuple[float, ...] = (1.0, 0.25)
    shape = MoEShape(layers=(1, 3), experts=8, top_k=2, hidden=64, intermediate=32)
    overhead_bytes = 128 << 10
    headroom_bytes = 64 << 20

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            cases = [pytest.param(c, id=str(c), marks=device_marks(c.device)) for c in self.cases()]
            metafunc.parametrize("case", cases)

    @classmethod
    def cases(cls) -> list[MoECase]:
        """Every spec that ``spec`` names on each device, dtype and share."""
        return [
            MoECase(spec, *point)
            for spec in load_specs(cls.spec)
            for point in product(cls.devices or device_kinds(spec.devices), cls.dtypes, cls.shares)
        ]

    # ------------------------------------------------------------------------------------------------ the tests

    def test_equals_the_dense_sum(self, case: MoECase) -> None:
        """Oracle: every expert computed for every token in float64, weighted and summed; decode and prefill sizes."""
        strategy, packed = self._filled(case)
        for layer, tokens in product(self.shape.layers, (1, 3, 40)):
            hidden, weights, experts = self._routed(case, tokens, seed=tokens)
            expected = dense_sum(hidden, weights, experts, packed[layer])
            out = self._step(strategy, layer, hidden, weights, experts)
            assert out.dtype == hidden.dtype
            assert_close(out, expected, case.dtype, self._reduction, f"layer {layer}, {tokens} tokens")

    def test_every_expert_is_reachable(self, case: MoECase) -> None:
        """Oracle: the dense sum, with each expert chosen alone in turn, twice round, so that slots are reused."""
        strategy, packed = self._filled(case)
        hidden, weights, _ = self._routed(case, 1, seed=1)
        for _, expert, layer in product(range(2), range(self.shape.experts), self.shape.layers):
            chosen = torch.tensor(
                [[expert, (expert + 3) % self.shape.experts]], dtype=torch.int32, device=hidden.device
            )
            out = self._step(strategy, layer, hidden, weights, chosen.clone())
            expected = dense_sum(hidden, weights, chosen, packed[layer])
            assert_close(out, expected, case.dtype, self._reduction, f"expert {expert} of layer {layer}")

    @pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
    def test_experts_come_in_any_order(self, case: MoECase, order: str) -> None:
        """Oracle: the dense sum, whatever order the weight stream had."""
        strategy, packed = self._filled(case, order)
        hidden, weights, experts = self._routed(case, 5, seed=2)
        for layer in self.shape.layers:
            out = self._step(strategy, layer, hidden, weights, experts.clone())
            expected = dense_sum(hidden, weights, experts, packed[layer])
            assert_close(out, expected, case.dtype, self._reduction, f"layer {layer}, accepted {order}")

    def test_accept_copies(self, case: MoECase) -> None:
        """Oracle: the dense sum over what was accepted, after the stream's tensors were overwritten."""
        strategy, packed = self._filled(case, spoil=True)
        hidden, weights, experts = self._routed(case, 4, seed=3)
        out = self._step(strategy, self.shape.layers[0], hidden, weights, experts.clone())
        expected = dense_sum(hidden, weights, experts, packed[self.shape.layers[0]])
        assert_close(out, expected, case.dtype, self._reduction)

    def test_several_pendings_may_be_open(self, case: MoECase) -> None:
        """Oracle: the dense sum of each, finished in the other order than started."""
        strategy, packed = self._filled(case)
        routed = [self._routed(case, 2, seed=n) for n in (4, 5)]
        strategy.begin_step(make_batch((1, 1), (1, 1), device=case.device))
        pendings = [
            strategy.start(layer, r[0], r[1], r[2].clone()) for layer, r in zip(self.shape.layers, routed, strict=True)
        ]
        outs = [strategy.finish(p) for p in reversed(pendings)][::-1]
        strategy.end_step()
        for layer, r, out in zip(self.shape.layers, routed, outs, strict=True):
            assert_close(out, dense_sum(*r, packed[layer]), case.dtype, self._reduction, f"layer {layer}")

    def test_rehearsal_leaves_no_trace(self, case: MoECase) -> None:
        """Oracle: the same step before and after a rehearsal, bit for bit; a rehearsal moves no bytes."""
        strategy, _ = self._filled(case)
        layer = self.shape.layers[0]
        hidden, weights, experts = self._routed(case, 3, seed=6)
        before = self._step(strategy, layer, hidden, weights, experts.clone()).clone()
        moved = dict(strategy.stats().moved_bytes)
        with strategy.rehearse():
            for tokens in (1, 7, 64):
                noise = self._routed(case, tokens, seed=tokens + 100)
                out = self._step(strategy, layer, *noise)
                assert out.shape == noise[0].shape
        assert dict(strategy.stats().moved_bytes) == moved, "a rehearsal fetched something"
        assert torch.equal(self._step(strategy, layer, hidden, weights, experts.clone()), before)

    def test_a_hint_changes_no_result(self, case: MoECase) -> None:
        """Oracle: the dense sum, after hints that are right, wrong and repeated."""
        strategy, packed = self._filled(case)
        layer = self.shape.layers[1]
        hidden, weights, experts = self._routed(case, 4, seed=7)
        for hinted in (experts, (experts + 1) % self.shape.experts, experts):
            strategy.hint(layer, hinted.clone())
        out = self._step(strategy, layer, hidden, weights, experts.clone())
        assert_close(out, dense_sum(hidden, weights, experts, packed[layer]), case.dtype, self._reduction)

    def test_seal_names_the_first_missing_expert(self, case: MoECase) -> None:
        """Oracle: the expert that was left out; its layer and number are in the message."""
        strategy = case.spec.create(self._setup(case))
        packed = self._packed(case)
        for layer, expert in product(self.shape.layers, range(self.shape.experts)):
            if (layer, expert) not in ((3, 5), (3, 6)):
                strategy.accept(layer, expert, packed[layer][expert])
        with pytest.raises(CheckpointError) as caught:
            strategy.seal()
        assert "5" in str(caught.value)
        assert "3" in str(caught.value)

    def test_an_expert_comes_once(self, case: MoECase) -> None:
        """Oracle: the contract. A second copy of an expert is an error, not a silent overwrite."""
        strategy = case.spec.create(self._setup(case))
        expert = self._packed(case)[1][2]
        strategy.accept(1, 2, expert)
        with pytest.raises(FreeTokenError, match="2"):
            strategy.accept(1, 2, expert)

    def test_the_budget_holds(self, case: MoECase) -> None:
        """Oracle: bytes of the tensors that live after the fill and some steps, against the declared claims.

        On a CUDA device the allocator's own count of device memory; on a CPU all storages that Python can reach.
        """
        setup = self._setup(case)
        claims = case.spec.budget(setup)
        assert claims == case.spec.budget(setup), "a budget is pure"
        on_device = [c.steady_bytes for c in claims if case.device == "cpu" or c.where == "device"]
        self._step(self._filled(case)[0], self.shape.layers[0], *self._routed(case, 4, seed=8))  # libraries' own memory
        before = _live_bytes(case.device)
        strategy, _ = self._filled(case, keep=False)
        for layer in self.shape.layers:
            self._step(strategy, layer, *self._routed(case, 4, seed=8))
        taken = _live_bytes(case.device) - before
        assert taken <= sum(on_device) + self.overhead_bytes, f"declared {sum(on_device)} bytes, took {taken}"

    def test_statistics_count_up(self, case: MoECase) -> None:
        """Oracle: the counters before; none may fall, and none is negative."""
        strategy, _ = self._filled(case)
        first = strategy.stats()
        self._step(strategy, self.shape.layers[0], *self._routed(case, 9, seed=9))
        second = strategy.stats()
        assert all(second.moved_bytes[cause] >= count >= 0 for cause, count in first.moved_bytes.items())
        assert second.hits >= first.hits >= 0
        assert second.misses >= first.misses >= 0

    # ------------------------------------------------------------------------------------------------ the parts

    @property
    def _reduction(self) -> int:
        return self.shape.hidden + self.shape.intermediate

    def _setup(self, case: MoECase) -> MoESetup:
        shape = self.shape
        op = OpShape("experts", case.dtype, cols=shape.hidden, intermediate=shape.intermediate)
        layers = tuple(ExpertLayer(layer, expert_layout(op), reference_experts) for layer in shape.layers)
        bank = 3 * shape.hidden * shape.intermediate * itemsize_bytes(case.dtype) * shape.experts * len(shape.layers)
        options = case.spec.options() if case.spec.options is not None else None
        memory = int(bank * case.share) + (self.headroom_bytes if case.share >= 1 else 0)
        setup = MoESetup(shape, layers, make_device(case.device), case.dtype, 64, 8, memory, 4 << 30, options)
        needed = sum(c.worst_bytes for c in case.spec.budget(setup) if c.where == "device")
        if needed > memory:
            assert case.share != self.shares[0], f"{needed} bytes are wanted where {memory} would hold every expert"
            pytest.skip(f"{case.spec.name} wants {needed} bytes, the share is {memory}")
        return setup

    def _packed(self, case: MoECase) -> dict[int, list[Expert]]:
        randn = normal(42, case.device)
        shape, dtype = self.shape, getattr(torch, case.dtype)
        return {
            layer: [
                {
                    "gate_up": (randn(2 * shape.intermediate, shape.hidden) * shape.hidden**-0.5).to(dtype),
                    "down": (randn(shape.hidden, shape.intermediate) * shape.intermediate**-0.5).to(dtype),
                }
                for _ in range(shape.experts)
            ]
            for layer in shape.layers
        }

    def _filled(
        self, case: MoECase, order: str = "forward", spoil: bool = False, keep: bool = True
    ) -> tuple[MoEStrategy, dict[int, list[Expert]]]:
        """A sealed strategy and the experts that it was given."""
        strategy = case.spec.create(self._setup(case))
        packed = self._packed(case)
        for layer, expert in _ordered(product(self.shape.layers, range(self.shape.experts)), order):
            given = {name: part.clone() for name, part in packed[layer][expert].items()}
            strategy.accept(layer, expert, given)
            if spoil:
                for part in given.values():
                    part.fill_(float("nan"))
        strategy.seal()
        return strategy, packed if keep else {}

    def _routed(self, case: MoECase, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """``hidden [T, H]``, ``weights [T, K]``, ``experts [T, K]``, each row's experts distinct."""
        generator = torch.Generator().manual_seed(seed)
        rows = [torch.randperm(self.shape.experts, generator=generator)[: self.shape.top_k] for _ in range(tokens)]
        weights = torch.rand(tokens, self.shape.top_k, generator=generator).to(case.device)
        hidden = normal(seed, case.device, getattr(torch, case.dtype))(tokens, self.shape.hidden)
        return hidden, weights, torch.stack(rows).int().to(case.device)

    def _step(self, strategy: MoEStrategy, layer: int, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """One step with one layer. A long query is a prompt, a few rows are a decode batch."""
        tokens = len(hidden)
        lens = ((1,) * tokens, (1,) * tokens) if tokens <= 4 else ((tokens,), (0,))
        strategy.begin_step(make_batch(*lens, device=hidden.device.type))
        out = strategy.finish(strategy.start(layer, hidden, weights, experts))
        strategy.end_step()
        return out


def dense_sum(hidden: Tensor, weights: Tensor, experts: Tensor, packed: Sequence[Expert]) -> Tensor:
    """``Σ_k weights · down(silu(gate(h)) · up(h))`` with every expert computed for every token, in float64."""
    x = hidden.double().cpu()
    total = torch.zeros_like(x)
    for expert, parts in enumerate(packed):
        gate, up = (x @ parts["gate_up"].double().cpu().T).chunk(2, dim=-1)
        y = (gate * torch.sigmoid(gate) * up) @ parts["down"].double().cpu().T
        share = (weights.double() * (experts == expert)).sum(-1, keepdim=True).cpu()
        total += share * y
    return total


def _ordered(pairs: Iterable[tuple[int, int]], order: str) -> list[tuple[int, int]]:
    listed = list(pairs)
    if order == "backward":
        return listed[::-1]
    if order == "shuffled":
        mixed = torch.randperm(len(listed), generator=torch.Generator().manual_seed(0)).tolist()
        return [listed[n] for n in mixed]
    return listed


def _live_bytes(device: str) -> int:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    # type(), not isinstance: the latter would wake lazy proxies of other libraries.
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
