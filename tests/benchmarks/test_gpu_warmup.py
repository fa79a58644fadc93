"""The script for warmup's promises on a GPU. Oracles: a toy run of it on a CPU, and figures put in by hand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_warmup
import pytest
from attrs import evolve
from gpu_warmup import TOY, Model, Report, as_fast
from mixed_traffic import Wishes, run_mixed

from freetoken.warmup.probes import SAMPLING, ServerLimits


def report(tmp_path: Path, limit_s: float = 100.0) -> Report:
    return Report(tmp_path / "found.json", time.monotonic() + limit_s, limit_s)


def saved(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    return found


# ------------------------------------------------------------------------------------------------ the whole


@pytest.mark.slow
def test_every_part_runs_at_toy_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Timing on a busy CPU proves nothing, so only what must be there and what must be quiet is looked at."""
    words = ["--toy", "--work", str(tmp_path / "work"), "--json", str(tmp_path / "found.json"), "--probes", "3"]
    gpu_warmup.main(words)
    found = saved(tmp_path)["found"]
    name = "tiny-qwen3-moe"
    for start in ("cold", "warm"):
        assert found[f"{name} verify {start}"]["certificate"]["probes"] == 3
        assert found[f"{name} verify {start}"]["counters"] == {"late_compiles": 0, "late_loads": 0}
        assert found[f"{name} {start}"]["ready_s"] > 0
    assert found[f"{name} mixed holds"]["what"] == "no late event"
    assert found[f"{name} mixed"]["requests"] > 3
    assert [row[0] for row in found[f"{name} lengths 1"]["tokens_first_again_s"]] == pytest.approx([20, 33], abs=2)
    assert len(found[f"{name} pairs"]["ladder"]) == len(found[f"{name} pairs"]["none"]) == 1
    assert {path.name for path in (tmp_path / "work" / name / "caches").iterdir()} >= {"freetoken"}
    assert not any("Error" in text for text in saved(tmp_path)["missed"])
    assert len(capsys.readouterr().out) < 6000, "two models stay within what is shown of a run"


# ------------------------------------------------------------------------------------------------ one by one


@pytest.mark.parametrize(
    ("first_s", "again_s", "fast"),
    [(0.1149, 0.1, True), (0.1151, 0.1, False), (0.015, 0.0101, True), (0.0152, 0.01, False), (0.01, 0.02, True)],
)
def test_first_over_again_by_hand(first_s: float, again_s: float, fast: bool) -> None:
    assert as_fast(first_s, again_s) is fast


def test_a_part_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    ours = evolve(report(tmp_path), part_limit_s=2 * gpu_warmup.LAST_S)
    ours = evolve(ours, part_limit_s=16.5)

    def slow(_: float) -> None:
        gpu_warmup.signal.setitimer(gpu_warmup.signal.ITIMER_REAL, 0.05)
        time.sleep(5)

    ours.part("slow", slow)
    ours.part("next", lambda limit_s: ours.judge("next", met=limit_s > 0, words="ran"))
    assert ours.missed == ["slow: OutOfTimeError: the part's time is up"]
    assert saved(tmp_path)["found"]["next holds"] == {"what": "ran"}


def test_without_time_a_part_is_named_and_left_out(tmp_path: Path) -> None:
    ours = report(tmp_path, limit_s=1.0)
    ours.part("late", lambda _: pytest.fail("it was run"))
    assert ours.missed == ["late: no time was left for it"]


@pytest.mark.parametrize(("ladder_s", "met"), [(6.5, True), (6.6, False)])
def test_the_cost_is_the_median_of_the_pairs_differences(
    ladder_s: float, met: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: 6.5 s is half a second more than 6; the first pair fills the caches and is not counted."""
    given = iter([99.0, 6.0, 7.0, 6.0, ladder_s, 6.0, 5.0, 6.0])

    @contextmanager
    def served(self: Model, log: str, *_: Any) -> Iterator[tuple[object, float]]:
        yield object(), next(given)

    monkeypatch.setattr(Model, "served", served)
    ours = report(tmp_path)
    (model,) = [gpu_warmup.made("tiny-qwen3.6-moe", tmp_path, evolve(TOY, pairs=3))]
    gpu_warmup.pairs(model, ours, 100.0)
    assert (not ours.missed) is met
    assert saved(tmp_path)["found"]["tiny-qwen3.6-moe pairs"]["ladder"] == [7.0, ladder_s, 5.0]
    config = json.loads((model.work / "shallow" / "config.json").read_text())
    assert config["text_config"]["num_hidden_layers"] == TOY.pair_layers


def test_late_events_after_mixed_traffic_are_missed_with_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("WARNING freetoken.warmup: after the warmup: load of a_kernel\n")
    server = SimpleNamespace(url="http://x", log=log, late_events=lambda: {"late_loads": 1.0})
    done = SimpleNamespace(as_json=dict, errors=[])
    monkeypatch.setattr(gpu_warmup, "run_mixed", lambda *_: done)
    monkeypatch.setattr(gpu_warmup, "health_of", lambda _: {"loads": 1})
    ours = report(tmp_path)
    gpu_warmup.mixed(gpu_warmup.made("tiny-qwen3", tmp_path, TOY), server, ours)  # type: ignore[arg-type]
    assert "load of a_kernel" in ours.missed[0]


# ------------------------------------------------------------------------------------------------ traffic

LIMITS = ServerLimits(longest=400, chunk=64, running=4, page=16, vocabulary=500, kv_tokens=2000)


def prompts_of(body: dict[str, Any]) -> list[list[int]]:
    return [body["prompt"]] if isinstance(body["prompt"][0], int) else body["prompt"]


def test_traffic_has_every_route_batches_shared_prefixes_and_cancellations() -> None:
    wishes = Wishes(LIMITS, 1)
    drawn = [wishes.next() for _ in range(300)]
    assert {wish.kind for wish in drawn} == {*SAMPLING, "cancelled"}
    assert {len(prompts_of(wish.body)) for wish in drawn} == {1, 2, 3, 5}
    prompts = [prompt for wish in drawn for prompt in prompts_of(wish.body)]
    assert min(map(len, prompts)) >= 1
    assert max(map(len, prompts)) > LIMITS.chunk
    starts = [tuple(prompt[:16]) for prompt in prompts if len(prompt) > 40]
    assert len(set(starts)) < 0.8 * len(starts), "prefixes are shared"
    for wish in drawn:
        assert max(map(len, prompts_of(wish.body))) + wish.body["max_tokens"] <= LIMITS.longest


def test_traffic_is_sent_counted_and_broken_off() -> None:
    """Oracle: a server of the standard library that notes what it was sent, and refuses one route."""
    seen: list[dict[str, Any]] = []
    limits = {
        "max_seq_tokens": 400, "max_prefill_tokens": 64, "max_running_requests": 4, "kv_tokens": 2000,
        "page_tokens": 16, "vocab_size": 500,
    }  # fmt: skip

    def refused(body: dict[str, Any]) -> bool:
        return "logit_bias" in body

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps({"limits": limits}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append(body)
            self.answer(400 if refused(body) else 200, b"data: {}\n\n" * 9)

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        counted = run_mixed(f"http://127.0.0.1:{server.server_address[1]}", 1.0, 3)
    finally:
        server.shutdown()
        server.server_close()
    assert sum(counted.kinds.values()) + len(counted.errors) == len(seen)
    assert counted.kinds["cancelled"] == sum(1 for body in seen if body.get("stream") and not refused(body))
    assert len(counted.errors) == sum(map(refused, seen)) > 0
    assert all("RuntimeError: status 400" in error for error in counted.errors)
