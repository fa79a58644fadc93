"""What a checkpoint is, after a family has read its configuration: the facts that shared code may ask for."""

from __future__ import annotations

from attrs import frozen

from freetoken.vocab.cache_spec import CacheSpec, PagedKV, RecurrentState


@frozen
class AttentionGroup:
    """Layers whose attention is alike: one backend object and one plan per step serve them all."""

    name: str
    layers: tuple[int, ...]
    q_heads: int
    cache: PagedKV
    scale: float

    @property
    def head_dim(self) -> int:
        return self.cache.k_dim


@frozen
class MoEShape:
    """The expert layers: ``experts`` of size ``hidden × intermediate`` (gate, up, down), ``top_k`` chosen a token."""

    layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    intermediate: int


@frozen
class ModelSpec:
    """The typed reading of a checkpoint's configuration.

    ``caches[i]`` is what layer ``i`` keeps between steps. ``details`` is the family's own frozen value; only the
    family looks inside.
    """

    family: str
    architecture: str
    num_layers: int
    hidden: int
    vocab_size: int
    max_context_tokens: int
    caches: tuple[CacheSpec, ...]
    attention: tuple[AttentionGroup, ...]
    parameters: int
    moe: MoEShape | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    details: object = None

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return sum(c.token_bytes for c in self.caches if isinstance(c, PagedKV))

    @property
    def state_slot_bytes(self) -> int:
        """Bytes of recurrent state that one sequence takes over all layers; 0 without recurrent layers."""
        return sum(c.slot_bytes for c in self.caches if isinstance(c, RecurrentState))
