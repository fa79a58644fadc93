"""The attention backend named ``torch``: any device, head size and window. Imports torch when created."""

from __future__ import annotations

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.protocols import AttentionBackend, AttentionSetup
from freetoken.plugin.specs import AttentionBackendSpec
from freetoken.vocab.dtypes import COMPUTE_DTYPES, itemsize_bytes
from freetoken.vocab.errors import EngineError
from freetoken.vocab.memory import MemoryClaim

# Of attention_plan and paged_attention, which import torch; a test compares.
GATHER_LIMIT_BYTES = 64 << 20
MASK_LIMIT_BYTES = 16 << 20
SCORES_LIMIT_BYTES = 64 << 20


def workspace(setup: AttentionSetup) -> tuple[MemoryClaim, ...]:
    """Gathered keys and values, one sequence's at least, twice where they are cast; masks; scores where made."""
    cache, limits = setup.group.cache, setup.limits
    token_bytes = cache.heads * (cache.k_dim + cache.v_dim) * itemsize_bytes(setup.dtype)
    sequence = limits.max_seq_tokens * token_bytes
    gathered = max(sequence, min(GATHER_LIMIT_BYTES, limits.max_running_requests * sequence))
    copies = 1 if cache.dtype == setup.dtype else 2
    scores = 0 if cache.k_dim == cache.v_dim else 2 * SCORES_LIMIT_BYTES
    peak = copies * gathered + 2 * MASK_LIMIT_BYTES + scores
    return (MemoryClaim("torch attention", f"gathered keys and masks of {setup.group.name}", gathered, peak),)


def create(setup: AttentionSetup) -> AttentionBackend:
    """Raises ``EngineError`` for a group or dtype that the spec does not cover."""
    from freetoken.ops.paged_attention import TorchAttention

    served = SPEC.serves(setup.group, setup.dtype)
    if not served:
        raise EngineError(f"attention backend torch for {setup.group.name}", served.reason)
    return TorchAttention(setup)


SPEC = AttentionBackendSpec(
    name="torch",
    summary="paged attention in plain torch, on any device",
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset(COMPUTE_DTYPES),
    create=create,
    windows=True,
    workspace=workspace,
)


@hookimpl
def freetoken_attention_backends() -> tuple[AttentionBackendSpec, ...]:
    return (SPEC,)
