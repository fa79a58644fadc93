"""The attention conformance suite over the library's stand-in: indices, plans, leases and captured plans."""

import pytest

from freetoken.testing.attention import AttentionConformance


@pytest.fixture(autouse=True)
def _library(library):
    return library


class TestOverTheStandIn(AttentionConformance):
    """Oracle: naive softmax in float64. Halves and the library's kernels are tested on a GPU, in ``test_device.py``."""

    spec = "freetoken_attention_flashinfer.spec:SPEC"
    devices = ("cpu",)
    dtypes = ("float16",)
