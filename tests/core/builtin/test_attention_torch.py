"""The built-in torch attention: the conformance suite, and what only this backend promises."""

from __future__ import annotations

from freetoken.testing.attention import AttentionConformance


class TestConformance(AttentionConformance):
    spec = "freetoken.builtin.attention_torch:freetoken_attention_backends"
