"""Filling the banks: pages of their own, one copy of the experts, pinning and its refusal."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from freetoken.memory.measure import PeakTracker
from freetoken.plugin.protocols import BankPart
from freetoken.vocab.hardware import Device
from freetoken_moe_offload.budget import PAGE_BYTES
from freetoken_moe_offload.host import HostLayer, Pinner

LAYOUT = (BankPart("gate_up", "float32", (64, 96)), BankPart("scale", "uint8", (3,)))


def test_parts_lie_on_pages_of_their_own_and_keep_what_they_are_given() -> None:
    """Oracle: addresses, and the tensors put in, in another order."""
    layer = HostLayer(7, LAYOUT, 5)
    given = [{p.name: torch.full(p.shape, n + 1).to(getattr(torch, p.dtype)) for p in LAYOUT} for n in range(5)]
    for expert in (3, 0, 4, 1, 2):
        layer.put(expert, given[expert])
    for part in LAYOUT:
        assert layer.parts[part.name].data_ptr() % PAGE_BYTES == 0
        assert torch.equal(layer.parts[part.name], torch.stack([packed[part.name] for packed in given]))
    assert layer.num_bytes == 31 * PAGE_BYTES  # 5 · 24576 bytes, and one page for 15


def test_filling_takes_the_experts_once() -> None:
    """Oracle: the process's own peak while 48 MiB of experts come in one by one: at most 1.05 × that."""
    part = BankPart("w", "float32", (1024, 1024))
    with PeakTracker(Device()) as tracker:
        layer = HostLayer(0, (part,), 12)
        packed = torch.ones(part.shape)
        for expert in range(12):
            layer.put(expert, {"w": packed})
    if not tracker.exact:
        pytest.skip("this system does not let a process reset its peak")
    assert tracker.extra_bytes <= 1.05 * layer.num_bytes + packed.nbytes + (2 << 20)


class Cudart:
    """A driver that pins at most ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:  # noqa: N802
        if size > self.room:
            return 2
        self.room -= size
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.room += self.pinned.pop(address)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Cudart(room=70 * PAGE_BYTES)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    return made


def test_layers_are_pinned_and_unpinned_with_their_memory(driver: Cudart) -> None:
    """Oracle: the driver's book."""
    layers = [HostLayer(n, LAYOUT, 5) for n in range(2)]
    pinner = Pinner(torch.device("cuda:0"))
    for layer in layers:
        pinner.add(layer)
    assert pinner.finish() == ()
    assert all(layer.pinned for layer in layers)
    assert driver.pinned == {layer.address: layer.num_bytes for layer in layers}
    del layers, layer, pinner
    assert driver.pinned == {}


def test_what_cannot_be_pinned_is_said_and_left(driver: Cudart, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: room for two layers of three; the third is named, with its bytes and the driver's error."""
    layers = [HostLayer(n, LAYOUT, 5) for n in range(3)]
    pinner = Pinner(torch.device("cuda:0"))
    for layer in layers:
        pinner.add(layer)
    with caplog.at_level(logging.WARNING):
        assert pinner.finish() == (2,)
    assert [layer.pinned for layer in layers] == [True, True, False]
    assert "124.0 KiB" in caplog.text
    assert "error 2" in caplog.text


def test_an_error_of_the_thread_is_raised(driver: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the exception that the driver's stand-in raised."""

    def broken(*_: object) -> int:
        raise OSError("no such bus")

    monkeypatch.setattr(driver, "cudaHostRegister", broken)
    pinner = Pinner(torch.device("cuda:0"))
    pinner.add(HostLayer(0, LAYOUT, 1))
    with pytest.raises(OSError, match="no such bus"):
        pinner.finish()


def test_the_fill_is_spread_over_the_layers_and_counted(filled: Any) -> None:
    """Oracle: 7 slots over 3 layers are 3, 2 and 2, the first experts of each; their bytes are the fill."""
    strategy = filled(3, 6, 2, slots=7)
    (cache,) = strategy._caches
    assert sorted(cache.owners()) == [0, 1, 2, 6, 7, 12, 13]
    stats = strategy.stats()
    assert stats.moved_bytes == {"fill": 7 * cache.group.expert_bytes, "decode": 0, "prefill": 0, "hint": 0}
    assert (stats.hits, stats.misses) == (0, 0)
