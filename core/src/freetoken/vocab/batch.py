"""One step's work, as the model sees it.

Shape legend, used in every docstring: ``T`` tokens in the batch, ``B`` sequences, ``R`` rows that need logits,
``H`` hidden size, ``Hq``/``Hkv`` query and key-value heads, ``D`` head size, ``E`` experts, ``K`` chosen experts,
``I`` intermediate size, ``P`` page size in tokens, ``V`` vocabulary, ``S`` expert slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class Batch:
    """A ragged batch: prefill, extend (cached prefix) and decode are one form.

    Sequence ``b`` brings ``query_lens[b]`` new tokens after ``prefix_lens[b]`` cached ones. Host integers are set by
    the scheduler and drive planning; tensors are on the compute device and set by the runner. Inside a replayed CUDA
    graph only the tensors are current.
    """

    query_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_starts: Tensor  # [B + 1] int32, offsets into T
    context_lens: Tensor  # [B] int32, prefix + query
    page_table: Tensor  # [B, max pages] int32, page ids in order; unused entries are 0
    kv_slots: Tensor  # [T] int64, page id × P + offset: where each new token's K and V go
    state_slots: Tensor  # [B] int64, row in the recurrent pools
    logit_rows: Tensor  # [R] int64, indices into T

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)

    @property
    def max_query_tokens(self) -> int:
        return max(self.query_lens)

    @property
    def max_context_tokens(self) -> int:
        return max(q + p for q, p in zip(self.query_lens, self.prefix_lens, strict=True))

    @property
    def is_decode(self) -> bool:
        """Every sequence brings exactly one token and has a prefix."""
        return all(q == 1 for q in self.query_lens) and all(self.prefix_lens)
