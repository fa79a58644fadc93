"""A sample of ``make compile-all``: every kernel of two published models compiles for one of the cards people own.

Oracle: Triton and ptxas for the card's architecture, and the shared memory that one block may take there. Which kernel
goes to which card follows from its place in the list, so that all cards have some.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("freetoken_kernels_triton")
pytest.importorskip("freetoken_attention_triton")

import trace_launches

from freetoken.ops.triton_stub import CompileRequest, Target, compile_request
from freetoken.testing.launch_trace import card_of
from freetoken.testing.launches import DEVICES
from freetoken.testing.plans import launch_space_of, planned
from freetoken.vocab.launch import StepPoint, TritonLaunch
from freetoken.warmup.compile_worker import compile_requests
from freetoken.warmup.keys import kernel_of

POINTS = (
    StepPoint(1, 1, 1, 40_000, 1, decode=True),
    StepPoint(17, 17, 1, 700, 17, decode=True),
    StepPoint(700, 3, 600, 900, 3, decode=False),
)


def requests_on(card: str) -> dict[str, CompileRequest]:
    """One request a kernel function, by its name."""
    found: dict[str, CompileRequest] = {}
    for model in trace_launches.MODELS:
        device = card_of(DEVICES[card])
        space = launch_space_of(planned(trace_launches.one_of_each(model), device, options=trace_launches.OPTIONS))
        for part in ("head", *(f"layers.{i}" for i in range(2))):
            for launch in (x for point in POINTS for x in _launches(space, part, point)):
                request = compile_request(launch, Target.of(device))
                found.setdefault(kernel_of(request.key), request)
    return dict(sorted(found.items()))


def _launches(space, part: str, point: StepPoint) -> list[TritonLaunch]:
    try:
        ops = space.ops(part)
    except KeyError:  # the model has fewer layers
        return []
    return [x for op in ops for x in op.launches(point) if isinstance(x, TritonLaunch)]


@pytest.mark.slow
def test_every_kernel_compiles_for_one_of_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cards = sorted(DEVICES)
    wanted = {card: requests_on(card) for card in cards}
    names = list(wanted[cards[0]])
    assert len(names) >= 20, "both models' kernels"
    for index, card in enumerate(cards):
        mine = [wanted[card][name] for name in names[index :: len(cards)]]
        report = compile_requests(mine, workers=1)
        assert report.errors == (), f"{card}: {report.errors}"
        for result in report.results:
            assert result.shared_memory_bytes <= DEVICES[card].shared_memory_bytes, (card, result.key)
