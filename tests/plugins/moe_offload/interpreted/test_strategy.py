"""The whole strategy with its kernels, decode steps fetched as on a GPU. Oracle: see ``freetoken.testing.moe``."""

from __future__ import annotations

from attrs import evolve

from freetoken.plugin.protocols import MoESetup
from freetoken.testing.moe import MoEConformance
from freetoken_moe_offload.cache import SlotCache
from freetoken_moe_offload.device_index import KernelFetch, KernelIndex
from freetoken_moe_offload.index import IndexState
from freetoken_moe_offload.launches import Shape, half_life
from freetoken_moe_offload.options import OffloadOptions
from freetoken_moe_offload.strategy import OffloadExperts


class _KernelCache(SlotCache):
    """A cache on a CPU that looks up and fetches by kernels; there is one stream."""

    def _fetch_on_device(self, state: IndexState, row: int) -> None:
        assert self._fetch is not None
        self._fetch.run(state, self.hosts[row].parts, self.bank)


def with_kernels(setup: MoESetup) -> OffloadExperts:
    strategy = OffloadExperts(setup)
    for cache in strategy._caches:
        cache.__class__ = _KernelCache
        shape = Shape(cache.group.experts, cache.slots, True, half_life(len(cache.group.layers)))
        cache._index = KernelIndex(shape)
        cache._fetch = KernelFetch(cache.group.layout, shape.room, 1, timed=False)
        for host in cache.hosts:
            host.pinned = True
    return strategy


class TestKernels(MoEConformance):
    spec = "freetoken_moe_offload.spec:SPEC"
    dtypes = ("float32",)
    shares = (1.0,)
    options = OffloadOptions(slots=5)

    @classmethod
    def cases(cls):
        return [evolve(case, spec=evolve(case.spec, create=with_kernels)) for case in super().cases()]

    def _setup(self, case):
        return evolve(super()._setup(case), options=self.options)


class TestKernelsWithRoomForAll(TestKernels):
    options = OffloadOptions()
