"""Forwards on scratch state: one layer of each kind, at any point of the step space; no request's cache is touched.

Every token is written to page 0 and every state to row 0, which no request is ever given.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from freetoken.run.layer_major import LayerMajorPass
from freetoken.run.runner import ModelRunner
from freetoken.run.sampler import Sampler
from freetoken.run.step_plan import SamplingRow
from freetoken.vocab.batch import Batch
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.sampling import SamplingParams
from freetoken.vocab.units import ceil_div

_FAST = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=0)
_FULL = SamplingParams(
    temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=0, min_tokens=1, presence_penalty=0.1, frequency_penalty=0.1,
    repetition_penalty=1.1, logit_bias=((0, 1.0),), logprobs=3,
)  # fmt: skip
"""Everything that the full route can be asked for, in one row."""


def split_tokens(total: int, parts: int, longest: int) -> tuple[int, ...]:
    """``total`` tokens over ``parts`` sequences: the first has ``longest``, the others share what is left."""
    if parts == 1:
        return (total,)
    rest = total - longest
    base, extra = divmod(rest, parts - 1)
    return (longest, *(base + (1 if i < extra else 0) for i in range(parts - 1)))


class ScratchForward:
    """``layers`` are the indices of one layer of each kind; embedding, head and sampler always run."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, layers: Sequence[int], page_tokens: int) -> None:
        self._runner = runner
        self._sampler = sampler
        self._layers = tuple(layers)
        self._page = page_tokens
        self._device = runner.pools.device

    @torch.inference_mode()
    def run(self, point: StepPoint) -> None:
        """One step at ``point``; returns when the device has done it."""
        batch = self.batch(point)
        moe = self._runner.moe
        with nullcontext() if moe is None else moe.rehearse():
            if moe is not None:
                moe.begin_step(batch)
            step = self._runner.prepare(batch)
            hidden = self._runner.model.embed(batch)
            for index in self._layers:
                hidden = self._runner.model.layers[index].forward(hidden, step)
            logits = self._runner.model.head(hidden.index_select(0, batch.logit_rows))
            if moe is not None:
                moe.end_step()
        self._sample(torch.nan_to_num(logits), point)

    @torch.inference_mode()
    def run_window(self, chunk_tokens: int, chunks: int) -> None:
        """Chunks of one prompt through the layers together, as under ``LayerMajorPass``; nothing is sampled."""
        batches = [
            self.batch(StepPoint(chunk_tokens, 1, chunk_tokens, (n + 1) * chunk_tokens, 1, decode=False))
            for n in range(chunks)
        ]
        moe, model = self._runner.moe, self._runner.model
        with nullcontext() if moe is None else moe.rehearse():
            window = LayerMajorPass(self._runner, batches, [model.layers[index] for index in self._layers])
            try:
                while not window.advance():
                    pass
                window.logits()
            finally:
                window.close()

    def _sample(self, logits: Tensor, point: StepPoint) -> None:
        """Draw every row by the point's route; on the full one every other row is a plain one, as in mixed traffic."""
        full = point.sampler_route == _FULL.route
        params = [_FULL if full and i % 2 == 0 else _FAST for i in range(point.rows)]
        rows = [SamplingRow(f"scratch-{i}", p, 0, 0, stop_ids=frozenset({0})) for i, p in enumerate(params)]
        for row in rows:
            self._sampler.add(row.request_id, row.params, prompt=(0,))
        try:
            result = self._sampler.sample(logits, rows)
            result.tokens.tolist()
            result.read_logprobs()
        finally:
            for row in rows:
                self._sampler.forget(row.request_id)

    def batch(self, point: StepPoint) -> Batch:
        """A batch with the point's totals: the first sequence is the longest, in new tokens and in context."""
        longest = 1 if point.decode else min(point.max_query, point.tokens - point.sequences + 1)
        queries = split_tokens(point.tokens, point.sequences, longest)
        prefixes = tuple(
            max(point.max_context - longest, 0) if i == 0 else int(point.decode) for i in range(len(queries))
        )
        starts = torch.zeros(len(queries) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(queries, dtype=torch.int32).cumsum(0)
        positions = torch.cat([torch.arange(p, p + q) for p, q in zip(prefixes, queries, strict=True)])
        pages = ceil_div(max(q + p for q, p in zip(queries, prefixes, strict=True)), self._page)
        device = self._device
        return Batch(
            query_lens=queries,
            prefix_lens=prefixes,
            tokens=torch.zeros(point.tokens, dtype=torch.int64, device=device),
            positions=positions.to(device),
            query_starts=starts.to(device),
            context_lens=torch.tensor(
                [q + p for q, p in zip(queries, prefixes, strict=True)], dtype=torch.int32, device=device
            ),
            page_table=torch.zeros((len(queries), pages), dtype=torch.int32, device=device),
            kv_slots=(positions % self._page).to(device),
            state_slots=torch.zeros(len(queries), dtype=torch.int64, device=device),
            logit_rows=(starts[1:] - 1).to(torch.int64)[: point.rows].to(device),
        )
