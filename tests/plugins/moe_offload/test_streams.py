"""What waits for what on a GPU, without one. Oracle: streams that keep, for each piece of work, all that is sure to be
done before it begins; what must not happen at the same time must be ordered, and what should overlap must not be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from freetoken.testing.fakes import make_batch

LAYERS, EXPERTS, TOP_K = 4, 8, 2
Work = tuple[Any, ...]


class Stream:
    """``done`` is what has ended before the next piece of work on this stream begins."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.done: set[Work] = set()

    def add(self, work: Work) -> None:
        self.machine.before[work] = set(self.done)
        self.done.add(work)

    def record_event(self) -> frozenset[Work]:
        return frozenset(self.done)

    def wait_event(self, event: Any) -> None:
        self.done |= event.done if isinstance(event, Event) else event

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done


class Event:
    """One that tells times; these are not looked at."""

    def __init__(self, **_: object) -> None:
        self.done: frozenset[Work] = frozenset()

    def record(self) -> None: ...

    def query(self) -> bool:
        return False


class Machine:
    """A strategy on a CPU whose copies and products are noted on two streams."""

    def __init__(self, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: dict[Work, set[Work]] = {}
        self.compute, self.copies = Stream(self), Stream(self)
        self.current = self.compute
        self.step = 0
        self.strategy = strategy
        (self.cache,) = strategy._caches
        self.cache._stream = self.copies
        copy, run = self.cache._copy, strategy._compute
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

        def noted_copy(row: int, experts: Any, slots: Any) -> None:
            for expert, slot in zip(experts, slots, strict=True):
                self.current.add(("copy", self.step, row, expert, slot))
            copy(row, experts, slots)

        def noted_compute(step: Any) -> None:
            if step.result is None:
                self.cache.wait(step.arrived)
                self.current.add(("compute", self.step, step.layer, tuple(sorted(set(step.slots.flatten().tolist())))))
                run(step)

        monkeypatch.setattr(self.cache, "_copy", noted_copy)
        monkeypatch.setattr(strategy, "_compute", noted_compute)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def start(self, layer: int, experts: list[int], tokens: int = 160) -> Any:
        self.step += 1
        rows = torch.tensor([experts[i % len(experts)] for i in range(2 * tokens)], dtype=torch.int32).view(-1, 2)
        return self.strategy.start(layer, torch.zeros(tokens, 8), torch.ones(rows.shape), rows)

    def work(self, kind: str, row: int) -> list[Work]:
        return [work for work in self.before if work[0] == kind and work[2] == row]

    def check_slots(self) -> None:
        """Whoever writes a slot and whoever reads it are ordered, one way or the other."""
        for reader in [w for w in self.before if w[0] == "compute"]:
            for writer in [w for w in self.before if w[0] == "copy" and w[4] in reader[3]]:
                assert writer in self.before[reader] or reader in self.before[writer], (writer, reader)


@pytest.fixture
def machine(filled: Any, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(filled(LAYERS, EXPERTS, TOP_K, slots=20), monkeypatch)
    made.strategy.begin_step(make_batch((160,), (0,)))
    return made


EVERY = list(range(EXPERTS))


def hint(machine: Machine, layer: int, experts: list[int]) -> None:
    rows = torch.tensor([experts[i % len(experts)] for i in range(320)], dtype=torch.int32).view(-1, 2)
    machine.strategy.hint(layer, rows)


def test_the_layer_at_hand_does_not_wait_for_the_next_ones_experts(machine: Machine) -> None:
    """Its products come after its own copies, and not after those that were started ahead meanwhile."""
    pending = machine.start(1, EVERY)
    hint(machine, 2, [7, 6])
    machine.strategy.finish(pending)
    (product,) = machine.work("compute", 1)
    assert machine.work("copy", 1)
    assert set(machine.work("copy", 1)) <= machine.before[product]
    ahead = machine.work("copy", 2)
    assert len(ahead) == 2
    assert not set(ahead) & machine.before[product]
    machine.check_slots()


def test_the_next_layer_waits_for_what_was_fetched_ahead(machine: Machine) -> None:
    """Even where it misses nothing more itself."""
    pending = machine.start(1, EVERY)
    hint(machine, 2, [7, 6])
    machine.strategy.finish(pending)
    ahead = machine.work("copy", 2)
    machine.strategy.finish(machine.start(2, [7, 6]))
    (product,) = machine.work("compute", 2)
    assert machine.work("copy", 2) == ahead, "it was all there"
    assert set(ahead) <= machine.before[product]
    machine.check_slots()


def test_a_decode_between_two_layers_waits_for_it_too(machine: Machine) -> None:
    """It may find those experts in its own look-up, or take their slots; a captured one waits for nothing by itself."""
    pending = machine.start(1, EVERY)
    hint(machine, 2, [7, 6])
    machine.strategy.finish(pending)
    ahead = set(machine.work("copy", 2))
    machine.strategy.begin_step(make_batch((1,), (1,)))
    assert ahead <= machine.compute.done
    machine.strategy.finish(machine.start(2, [7, 6], tokens=1))
    machine.strategy.end_step()
    (product,) = machine.work("compute", 2)
    assert ahead <= machine.before[product]
    machine.check_slots()


def test_what_comes_ahead_waits_for_those_that_still_read_the_slots(machine: Machine) -> None:
    """Four layers in turn with three chunks each and a hint at every one: every slot's readers and writers are ordered,
    and each chunk waits for its own layer's copies alone."""
    for layer in range(LAYERS):
        pendings = [machine.start(layer, EVERY[n:] + EVERY[:n]) for n in range(3)]
        if layer + 1 < LAYERS:
            hint(machine, layer + 1, [5, 3, 1])
        for pending in pendings:
            machine.strategy.finish(pending)
    machine.strategy.end_step()
    machine.check_slots()
    assert machine.strategy.stats().moved_bytes["hint"] > 0
    for layer in range(LAYERS - 1):
        for product in machine.work("compute", layer):
            later = {work for work in machine.work("copy", layer + 1) if work[1] <= product[1]}
            assert not later & machine.before[product]
