"""The attention conformance suite on a GPU, with the library itself. Builds a module for each dtype and head size."""

import pytest

pytest.importorskip("flashinfer")

from freetoken.testing.attention import AttentionConformance


class TestFlashInfer(AttentionConformance):
    """Oracle: naive softmax in float64."""

    spec = "freetoken_attention_flashinfer.spec:SPEC"
