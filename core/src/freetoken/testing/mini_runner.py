"""A model on plain torch ops without plan, loader or scheduler: what family tests run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from attrs import define, field
from torch import Tensor

from freetoken.ops.reference import REFERENCE
from freetoken.ops.table import OpTable
from freetoken.plugin.protocols import AttentionBackend, LoadedKernel, ModelParts, MoEStrategy, Step
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.testing.stored import index_of, view_of
from freetoken.vocab.batch import Batch
from freetoken.vocab.cache_spec import CacheSpec, PagedKV
from freetoken.vocab.hardware import Device
from freetoken.vocab.model_spec import AttentionGroup, ModelSpec
from freetoken.vocab.weight import WeightSlot

PAGE_TOKENS = 16


class MiniAttention:
    """Attention over pages, one sequence at a time, in float32."""

    def __init__(self, group: AttentionGroup) -> None:
        self.group = group

    def plan(self, batch: Batch) -> Batch:
        return batch

    def forward(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int, plan: Batch) -> Tensor:
        """``q [T, Hq, D]`` → ``[T, Hq, Dv]``."""
        assert layer in self.group.layers, f"layer {layer} is not in the group"
        outs, start = [], 0
        for b, (new, prefix) in enumerate(zip(plan.query_lens, plan.prefix_lens, strict=True)):
            pages = plan.page_table[b, : -(-(new + prefix) // k_pool.shape[1])].long()
            k, v = (p[pages].flatten(0, 1)[: new + prefix].transpose(0, 1) for p in (k_pool, v_pool))
            seen = torch.arange(new + prefix) <= torch.arange(prefix, prefix + new)[:, None]
            rows = q[start : start + new].transpose(0, 1)
            out = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen, scale=self.group.scale, enable_gqa=True)
            outs.append(out.transpose(0, 1))
            start += new
        return torch.cat(outs)


class MiniExperts:
    """All experts of all layers in stacked banks."""

    def __init__(self, experts: Mapping[tuple[int, int], tuple[Tensor, Tensor, Tensor]]) -> None:
        self.banks: dict[int, dict[str, Tensor]] = {}
        for layer in sorted({layer for layer, _ in experts}):
            chosen = [experts[key] for key in sorted(experts) if key[0] == layer]
            self.banks[layer] = {
                "gate_up": torch.stack([torch.cat(e[:2]) for e in chosen]),
                "down": torch.stack([e[2] for e in chosen]),
            }

    def start(self, layer: int, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out: Tensor = REFERENCE["experts"](hidden, weights, experts, self.banks[layer])
        return out

    def finish(self, pending: Tensor) -> Tensor:
        return pending


@define
class MiniSequence:
    """One sequence: its pages, state slot and how many tokens it holds."""

    slot: int
    pages: list[int] = field(factory=list)
    tokens: int = 0


class MiniRunner:
    """Runs batches of sequences; every step returns the logits of every new token.

    ``tensors`` are the checkpoint's, by stored name; they are loaded in float32. Pages are handed out in a scattered
    order, so that a layer that mistakes pages for positions is found out.
    """

    def __init__(
        self, family: ModelFamilySpec, config: Mapping[str, object], tensors: Mapping[str, Tensor], *, pages: int = 128
    ) -> None:
        self.spec: ModelSpec = family.read_config(config, "float32")
        self.slots = family.weights(self.spec, index_of(tensors))
        kernels = {
            shape: LoadedKernel(REFERENCE[shape.op]) for _, s in family.op_shapes(self.spec, "float32") for shape in s
        }
        experts = {
            (slot.layer, slot.expert): tuple(_pieces(slot, tensors)) for slot in self.slots if slot.kind == "experts"
        }
        self.parts = ModelParts(
            {slot.name: _bound(slot, tensors) for slot in self.slots if slot.kind != "experts"},
            OpTable(kernels),  # type: ignore[arg-type]
            {g.name: cast(AttentionBackend, MiniAttention(g)) for g in self.spec.attention},
            cast(MoEStrategy, MiniExperts(cast(Any, experts))) if experts else None,
            Device(),
            "float32",
        )
        self.model = family.build(self.spec, self.parts)
        self.free_pages = list(torch.randperm(pages, generator=torch.Generator().manual_seed(7)).tolist())
        self.caches = [_pools(cache, pages, 64) for cache in self.spec.caches]
        self.sequences = 0

    def new_sequence(self) -> MiniSequence:
        self.sequences += 1
        return MiniSequence(self.sequences - 1)

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[MiniSequence, Sequence[int]]]) -> list[Tensor]:
        """Bring each sequence its new tokens, all in one ragged batch → logits ``[new tokens, V]`` for each."""
        batch = self._batch(work)
        step = Step(batch, {n: b.plan(batch) for n, b in self.parts.attention.items()}, self.caches)
        hidden = self.model.embed(batch)
        for layer in self.model.layers:
            hidden = layer.forward(hidden, step)
        logits = self.model.head(hidden[batch.logit_rows])
        for sequence, tokens in work:
            sequence.tokens += len(tokens)
        return list(logits.split([len(tokens) for _, tokens in work]))  # type: ignore[no-untyped-call]

    def logits(self, tokens: Sequence[int], chunk: int = 0) -> Tensor:
        """``[T, V]`` of a fresh sequence, brought in chunks of ``chunk`` tokens (0: whole)."""
        sequence, size = self.new_sequence(), chunk or len(tokens)
        return torch.cat([self.step([(sequence, tokens[i : i + size])])[0] for i in range(0, len(tokens), size)])

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """``num_tokens`` tokens after ``prompt``, and the logits ``[num_tokens, V]`` they were chosen from."""
        sequence, new, rows = self.new_sequence(), list(prompt), []
        chosen: list[int] = []
        for _ in range(num_tokens):
            rows.append(self.step([(sequence, new)])[0][-1])
            new = [int(rows[-1].argmax())]
            chosen += new
        return chosen, torch.stack(rows)

    def _batch(self, work: Sequence[tuple[MiniSequence, Sequence[int]]]) -> Batch:
        for sequence, tokens in work:
            while len(sequence.pages) * PAGE_TOKENS < sequence.tokens + len(tokens):
                sequence.pages.append(self.free_pages.pop())
        query = tuple(len(tokens) for _, tokens in work)
        prefix = tuple(sequence.tokens for sequence, _ in work)
        places = [(s, p) for s, tokens in work for p in range(s.tokens, s.tokens + len(tokens))]
        table = torch.zeros(len(work), max(len(s.pages) for s, _ in work), dtype=torch.int32)
        for row, (sequence, _) in zip(table, work, strict=True):
            row[: len(sequence.pages)] = torch.tensor(sequence.pages)
        return Batch(
            query,
            prefix,
            tokens=torch.tensor([t for _, tokens in work for t in tokens]),
            positions=torch.tensor([p for _, p in places]),
            query_starts=torch.tensor((0, *query)).cumsum(0).int(),
            context_lens=torch.tensor([q + p for q, p in zip(query, prefix, strict=True)], dtype=torch.int32),
            page_table=table,
            kv_slots=torch.tensor([s.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for s, p in places]),
            state_slots=torch.tensor([s.slot for s, _ in work]),
            logit_rows=torch.arange(len(places)),
        )


def _pieces(slot: WeightSlot, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [view_of(tensors[s.tensor], s).float() for s in slot.sources]


def _bound(slot: WeightSlot, tensors: Mapping[str, Tensor]) -> Any:
    stacked = torch.cat(_pieces(slot, tensors))
    assert tuple(stacked.shape) == slot.shape, f"{slot.name}: {tuple(stacked.shape)} is not {slot.shape}"
    if slot.kind == "vector":
        return stacked + slot.add
    return partial(_swapped, REFERENCE[slot.kind], stacked)


def _swapped(op: Any, packed: Tensor, x: Tensor) -> Any:
    return op(x, packed)


def _pools(cache: CacheSpec, pages: int, slots: int) -> tuple[Tensor, ...]:
    """Pools filled with a value that spoils every result it leaks into."""
    shapes: list[tuple[int, ...]]
    if isinstance(cache, PagedKV):
        shapes = [(pages, PAGE_TOKENS, cache.heads, dim) for dim in (cache.k_dim, cache.v_dim)]
    else:
        shapes = [(slots, *shape) for shape in cache.shapes]
    return tuple(torch.full(shape, 1e3) for shape in shapes)
