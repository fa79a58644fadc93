"""The memory of steps and windows, taken before serving. Oracle: a scratch forward that runs out of memory at will."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from attrs import evolve

from freetoken.config.engine_options import CoreOptions
from freetoken.models import llama
from freetoken.run.peak import take_step_memory
from freetoken.testing.plans import planned
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.plan import Plan, Sizing
from freetoken.vocab.units import GIB

CARD = Device("cuda", 0, "card", (9, 0), 132, 232_448, 24 * GIB, 23 * GIB)
CHUNK = 16


class Scratch:
    """Windows of more than ``room`` chunks do not fit."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.ran: list[Any] = []

    def run(self, point: StepPoint) -> None:
        self.ran.append(point.tokens)

    def run_window(self, chunk_tokens: int, chunks: int) -> None:
        self.ran.append((chunk_tokens, chunks))
        if chunks > self.room:
            raise torch.OutOfMemoryError("no")


@pytest.fixture(scope="module")
def plan() -> Plan:
    options = CoreOptions(max_seq_len=128, max_prefill_tokens=CHUNK)
    return planned(llama.FAMILY.tiny(), CARD, options=options).plan


@pytest.mark.parametrize(
    ("window", "room", "fits", "ran"),
    [
        (0, 9, 0, [CHUNK]),
        (64, 9, 64, [CHUNK, (CHUNK, 4)]),
        (1000, 9, 1000, [CHUNK, (CHUNK, 8)]),  # no prompt is longer than 128 tokens
        (1000, 2, 32, [CHUNK, (CHUNK, 8), (CHUNK, 4), (CHUNK, 2)]),
        (64, 1, 0, [CHUNK, (CHUNK, 4), (CHUNK, 2)]),
    ],
)
def test_the_largest_window_that_fits_is_run_and_told(
    plan: Plan, window: int, room: int, fits: int, ran: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The largest step first, then the window, halved until it fits; a smaller one than planned is warned of."""
    scratch = Scratch(room)
    with caplog.at_level(logging.WARNING, logger="freetoken.engine"):
        assert take_step_memory(plan, Sizing.of(plan), scratch, window) == fits  # type: ignore[arg-type]
    assert scratch.ran == ran
    assert bool(caplog.records) == (fits < window)


def test_a_cpu_takes_memory_as_it_goes(plan: Plan) -> None:
    """Nothing is run there."""
    scratch = Scratch(0)
    there = evolve(plan, device=Device())
    assert take_step_memory(there, Sizing.of(plan), scratch, 64) == 64  # type: ignore[arg-type]
    assert scratch.ran == []
