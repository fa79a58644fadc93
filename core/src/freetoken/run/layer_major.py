"""A prompt's chunks through the layers together: all of them pass a layer before the next layer starts.

For experts that lie elsewhere: whatever a layer needs is brought once for all chunks. Between two layers the pass can
be put aside, since nothing but the hidden states goes from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from freetoken.plugin.protocols import Layer
from freetoken.run.runner import ModelRunner
from freetoken.vocab.batch import Batch

Foresight = Callable[[Tensor], "tuple[int, Tensor] | None"]


class LayerMajorPass:
    """``batches`` are consecutive chunks: each finds in a layer's caches what those before it left there.

    A layer that offers ``begin`` is begun for every chunk before it is ended for the first, so that what it waits for
    is on its way while the other chunks compute. Where the strategy wants hints, the next layer foresees its experts
    from this one's input, so that the first of them come while this one computes its own. ``layers``: instead of all.
    """

    def __init__(self, runner: ModelRunner, batches: Sequence[Batch], layers: Sequence[Layer] | None = None) -> None:
        self._runner = runner
        self._layers = runner.model.layers if layers is None else layers
        self._steps = [runner.prepare(batch) for batch in batches]
        self._hidden = [runner.model.embed(batch) for batch in batches]
        self._next = 0
        self._open = runner.moe is not None
        if runner.moe is not None:
            runner.moe.begin_step(batches[0])

    @property
    def layers_left(self) -> int:
        return len(self._layers) - self._next

    def advance(self) -> bool:
        """All chunks through the next layer; ``True`` when it was the last."""
        layer = self._layers[self._next]
        begin = getattr(layer, "begin", None)
        if begin is None:
            self._one_by_one(layer)
        else:
            self._overlapped(begin, self._foresight())
        self._next += 1
        if self.layers_left == 0:
            self.close()
        return self.layers_left == 0

    def _one_by_one(self, layer: Layer) -> None:
        for i, step in enumerate(self._steps):
            self._hidden[i] = layer.forward(self._hidden[i], step)

    def _foresight(self) -> Foresight | None:
        """The next layer's, if the strategy would act on it."""
        if self.layers_left == 1 or not getattr(self._runner.moe, "foresees", False):
            return None
        return getattr(self._layers[self._next + 1], "foresee", None)

    def _overlapped(self, begin: Callable[..., Callable[[], Tensor]], foresee: Foresight | None) -> None:
        rest, foreseen = [], []
        hidden, self._hidden = self._hidden, []
        for i, step in enumerate(self._steps):
            rest.append(begin(hidden[i], step))
            if foresee is not None:
                foreseen.append(foresee(hidden[i]))
            hidden[i] = cast("Tensor", None)  # a window's hidden states are large: none is kept longer than needed
        self._hint([item for item in foreseen if item is not None])
        for i, end in enumerate(rest):
            self._hidden.append(end())
            rest[i] = cast("Callable[[], Tensor]", None)

    def _hint(self, foreseen: Sequence[tuple[int, Tensor]]) -> None:
        """All chunks' in one: read on the host, which has waited for the last look-up anyway."""
        if foreseen and self._runner.moe is not None:
            self._runner.moe.hint(foreseen[0][0], torch.cat([experts.cpu() for _, experts in foreseen]))

    def logits(self) -> Tensor | None:
        """After the last layer: ``[R, V]`` float32 of the last chunk's rows, ``None`` when it wants none."""
        rows = self._steps[-1].batch.logit_rows
        if not rows.numel():
            return None
        return self._runner.model.head(self._hidden[-1].index_select(0, rows))

    def close(self) -> None:
        """The strategy's step is over: after the last layer, or because nobody wants the window any more."""
        if self._open and self._runner.moe is not None:
            self._open = False
            self._runner.moe.end_step()
