"""A group of layers as the op shape that its launch space is declared for."""

from __future__ import annotations

from freetoken.plugin.protocols import AttentionSetup
from freetoken.vocab.ops import OpShape
from freetoken.warmup.launch_space import attention_shape as _attention_shape


def attention_shape(setup: AttentionSetup) -> OpShape:
    """The shape of ``setup``'s group, as the core's launch space asks for it."""
    return _attention_shape(setup.group, setup.dtype, setup.limits.page_tokens)
