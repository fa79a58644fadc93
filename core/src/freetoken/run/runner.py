"""Runs a model over a batch. The runner owns the order of the layers; nothing else passes between them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.kv.pool import CachePools
from freetoken.plugin.protocols import AttentionBackend, Model, MoEStrategy, Step
from freetoken.vocab.batch import Batch


class ModelRunner:
    """Embeds, walks the layers, selects the rows that need logits, and applies the head."""

    def __init__(
        self,
        model: Model,
        attention: Mapping[str, AttentionBackend],
        moe: MoEStrategy | None,
        pools: CachePools,
    ) -> None:
        self.model = model
        self.attention = attention
        self.moe = moe
        self.pools = pools
        self._caches = [pools.layer(i) for i in range(len(model.layers))]

    def prepare(self, batch: Batch) -> Step:
        """Plan the batch with every attention backend."""
        return Step(batch, {name: backend.plan(batch) for name, backend in self.attention.items()}, self._caches)

    def forward(self, step: Step) -> Tensor:
        """Logits ``[R, V]`` float32 of the rows that ``step.batch.logit_rows`` names; no host synchronisation."""
        hidden = self.model.embed(step.batch)
        for layer in self.model.layers:
            hidden = layer.forward(hidden, step)
        return self.model.head(hidden.index_select(0, step.batch.logit_rows))

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor | None:
        """One whole step: ``None`` when no row needs logits."""
        if self.moe is None:
            return self._run(batch)
        self.moe.begin_step(batch)
        try:
            return self._run(batch)
        finally:
            self.moe.end_step()

    def _run(self, batch: Batch) -> Tensor | None:
        step = self.prepare(batch)
        if batch.logit_rows.numel():
            return self.forward(step)
        hidden = self.model.embed(batch)
        for layer in self.model.layers:
            hidden = layer.forward(hidden, step)
        return None
