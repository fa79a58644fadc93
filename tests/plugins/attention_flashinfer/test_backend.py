"""What the backend refuses, which wrappers its plans hold, what its package must not import, and how it ranks."""

import gc
import subprocess
import sys

import pytest
import torch

from freetoken.config.choices import pick
from freetoken.plugin.protocols import AttentionLimits, AttentionSetup
from freetoken.testing.fakes import make_batch
from freetoken.testing.launches import DEVICES
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.errors import EngineError
from freetoken.vocab.hardware import Device
from freetoken.vocab.model_spec import AttentionGroup
from freetoken_attention_flashinfer import backend as backend_module
from freetoken_attention_flashinfer import kernels, rank
from freetoken_attention_flashinfer.spec import SPEC

LIMITS = AttentionLimits(16, 512, 8, 64)


class HandFence:
    """Opened by the test: before that, the device may still read the host's arrays."""

    def __init__(self) -> None:
        self.open, self.waits = True, 0

    def set(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open

    def wait(self) -> None:
        self.waits += not self.open
        self.open = True


@pytest.fixture(autouse=True)
def _library(library):
    return library


def make_setup(cache: PagedKV = PagedKV(2, 64, 64, "float16"), device: Device = Device()) -> AttentionSetup:
    return AttentionSetup(AttentionGroup("g", (0,), 4, cache, 0.125), device, "float16", LIMITS)


def make_backend():
    return SPEC.create(make_setup())


def test_what_the_library_cannot_read_is_refused() -> None:
    backend = make_backend()
    plan = backend.plan(make_batch((3,), (0,)))
    q = torch.zeros(3, 4, 64, dtype=torch.float16)
    pool = torch.zeros(8, 16, 2, 64, dtype=torch.float16)
    with pytest.raises(EngineError, match="heads side by side"):
        backend.forward(q.transpose(0, 1).contiguous().transpose(0, 1), pool, pool, 0, plan)
    with pytest.raises(EngineError, match="pool whole"):
        backend.forward(q, pool.transpose(1, 2), pool, 0, plan)
    with pytest.raises(EngineError, match="values of 32"):
        SPEC.create(make_setup(PagedKV(2, 64, 32, "float16")))


def test_captures_need_memory_and_their_own_size() -> None:
    backend = make_backend()
    batch = make_batch((1, 1), (5, 9))
    with pytest.raises(EngineError, match="reserve_graph first"):
        backend.plan_capture(batch)
    backend.reserve_graph(LIMITS)
    plan = backend.plan_capture(batch)
    with pytest.raises(EngineError, match="captured for 2"):
        backend.plan_replay(plan, make_batch((1,), (5,)))
    with pytest.raises(EngineError, match="more than one token"):
        backend.plan_capture(make_batch((2, 1), (5, 9)))
    with pytest.raises(EngineError, match="reserve for longer contexts"):
        backend.plan_replay(plan, make_batch((1, 1), (4090, 4090)))
    with pytest.raises(EngineError, match="5000 sequences"):
        backend.reserve_graph(AttentionLimits(16, 512, 5000, 64))
    backend.release_graph()
    with pytest.raises(EngineError, match="reserve_graph first"):
        backend.plan_capture(batch)


def test_a_plan_owns_its_arrays() -> None:
    backend = make_backend()
    batch = make_batch((3, 1), (4, 40))
    plan = backend.plan(batch)
    before = [t.clone() for t in plan.wrapper.buffers]
    for tensor in (batch.page_table, batch.query_starts, batch.context_lens):
        tensor.fill_(99)
    backend.plan(make_batch((1, 1, 1), (30, 5, 99)))
    assert all(torch.equal(old, new) for old, new in zip(before, plan.wrapper.buffers, strict=True))


def test_a_step_planned_ahead_never_takes_the_wrapper_of_the_one_in_flight(library, monkeypatch) -> None:
    """Oracle: the wrappers themselves, while fences stay closed as on a device that is behind."""
    monkeypatch.setattr(backend_module, "make_fence", lambda _: HandFence())
    backend = make_backend()
    for _ in range(3):
        backend.plan(make_batch((1, 1), (5, 9)))  # dropped at once, yet the device has read none of them
    gc.collect()
    assert len(library.Wrapper.made) == 3
    assert [wrapper.plans for wrapper in library.Wrapper.made] == [1, 1, 1]


def test_wrappers_are_used_again(library) -> None:
    backend = make_backend()
    for _ in range(5):
        backend.plan(make_batch((1, 1), (5, 9)))
    assert [wrapper.plans for wrapper in library.Wrapper.made] == [5]


def test_a_replay_waits_only_for_the_plan_before_the_last(library, monkeypatch) -> None:
    monkeypatch.setattr(backend_module, "make_fence", lambda _: HandFence())
    backend = make_backend()
    backend.reserve_graph(LIMITS)
    batch = make_batch((1, 1), (5, 9))
    plan = backend.plan_capture(batch)
    one, other = (lease.fence for lease in plan.ring)
    assert (one.waits, other.waits) == (0, 0)
    one.open = other.open = True
    backend.plan_replay(plan, batch)
    backend.plan_replay(plan, batch)
    assert one.waits + other.waits == 0
    backend.plan_replay(plan, batch)
    assert one.waits + other.waits == 1


def test_a_step_beyond_the_limits_gets_the_room_it_needs(library) -> None:
    backend = make_backend()
    backend.plan(make_batch((3000,), (0,)))
    assert library.Wrapper.made[0].ints.numel() > backend._int_bytes


def test_hopper_kernels_where_the_table_has_the_card(library, monkeypatch) -> None:
    """Oracle: which of the library's kernels the wrapper was made for."""
    monkeypatch.setattr(kernels, "FA3_ARCHS", frozenset({0}))
    backend = make_backend()
    kinds = [backend.plan(make_batch(q, p)).wrapper.backend for q, p in (((1,), (5,)), ((5000,), (0,)), ((5,), (0,)))]
    assert kinds == ["fa2", "fa3", "fa2"]


@pytest.mark.parametrize(
    ("card", "variable", "dependent"), [("h200", "1", True), ("h200", "0", False), ("a100", "1", False)]
)
def test_one_switch_for_dependent_launches(monkeypatch, card: str, variable: str, dependent: bool) -> None:
    """Oracle: what the wrapper is told, against the core's one place that decides it for every kernel."""
    monkeypatch.setenv("FREETOKEN_DEPENDENT_LAUNCH", variable)
    monkeypatch.setattr(Device, "torch_name", "cpu")
    backend = SPEC.create(make_setup(device=DEVICES[card]))
    monkeypatch.setattr(backend_module, "make_fence", lambda _: HandFence())
    plan = backend.plan(make_batch((1,), (5,)))
    q, pool = torch.zeros(1, 4, 64, dtype=torch.float16), torch.zeros(9, 16, 2, 64, dtype=torch.float16)
    backend.forward(q, pool, pool, 0, plan)
    assert plan.wrapper.dependent is dependent


def test_imports() -> None:
    """Oracle: the module table of a fresh interpreter."""
    banned = ("torch", "flashinfer")
    code = f"import sys, freetoken_attention_flashinfer.spec; print(*[n for n in {banned!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("table", "above", "words"),
    [
        ((), False, "not measured"),
        ((rank.Measured("H200", 1.2, 1.1),), True, "prefill 1.20, decode 1.10"),
        ((rank.Measured("H200", 1.2, 0.9),), False, "decode 0.90"),
        ((rank.Measured("H200", 1.0, 1.0),), False, "prefill 1.00"),
        ((rank.Measured("H200", 1.2, 1.1), rank.Measured("RTX 4090", 0.8, 1.0)), False, "RTX 4090"),
    ],
)
def test_the_rank_follows_the_table(table: tuple[rank.Measured, ...], above: bool, words: str) -> None:
    assert (rank.priority(table) > rank.TRITON_PRIORITY) is above
    assert words in rank.because(table)


def _first(kind, subject, candidates, hardware):
    """The core's own answer to ``freetoken_choose``."""
    from freetoken.builtin.choose_first import freetoken_choose

    return freetoken_choose(candidates)


def test_the_rank_is_told_by_explain() -> None:
    """Oracle: the choice that ``freetoken explain`` prints, with both backends fitting; and Triton's own spec."""
    from freetoken.config.choices import Surroundings
    from freetoken.plugin.catalog import Catalog, Catalogs, Offer
    from freetoken.vocab.availability import Availability
    from freetoken.vocab.hardware import Hardware
    from freetoken.vocab.kinds import ATTENTION_BACKEND

    triton = pytest.importorskip("freetoken_attention_triton.spec").SPEC
    assert triton.priority == rank.TRITON_PRIORITY
    hardware = Hardware(accelerators=(DEVICES["h200"],))
    offers = tuple(Offer(spec, spec.name) for spec in (triton, SPEC))
    around = Surroundings(Catalogs, hardware, DEVICES["h200"], _first, lambda _: Availability.yes())
    catalog = Catalog(ATTENTION_BACKEND, {offer.spec.name: offer for offer in offers})
    chosen, choice = pick(around, catalog, "auto", "layers", lambda _: Availability.yes(), offers=offers)
    notes = {note.name: note.why for note in choice.candidates}
    assert chosen is triton
    assert notes["flashinfer"] == f"fits, ranked lower: {rank.because()}"
