"""The core's suite for MoE strategies, at several numbers of slots. Oracle: see ``freetoken.testing.moe``."""

from __future__ import annotations

from attrs import evolve

from freetoken.testing.moe import MoEConformance
from freetoken_moe_offload.options import OffloadOptions


class TestOffload(MoEConformance):
    spec = "freetoken_moe_offload.spec:SPEC"
    shares = (1.0, 0.5, 0.25)


class _FixedSlots(MoEConformance):
    """A fixed number of slots, however much memory there is."""

    spec = "freetoken_moe_offload.spec:SPEC"
    shares = (1.0,)
    dtypes = ("float32",)
    options = OffloadOptions()

    def _setup(self, case):
        return evolve(super()._setup(case), options=self.options)


class TestTheFewestSlots(_FixedSlots):
    options = OffloadOptions(slots=2)


class TestLRU(_FixedSlots):
    options = OffloadOptions(slots=5, policy="lru")
