"""``freetoken warmup``. Oracles: the plan as JSON, a cache filled twice, and a server of the standard library."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from freetoken.cli import warmup_verify
from freetoken.cli.main import main
from freetoken.cli.verify_progress import LogTail, ProbeProgress
from freetoken.cli.warmup_prober import Prober
from freetoken.cli.warmup_verify import given_flags, store
from freetoken.config.sources import FlagValue, OptionTable, merge
from freetoken.models import llama
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.selection import Selection
from freetoken.testing.plans import planned
from freetoken.vocab.launch import StepPoint
from freetoken.warmup.certificate import Evidence
from freetoken.warmup.fingerprint import take_fingerprint
from freetoken.warmup.manifest import LateNote, Manifest, ManifestStore
from freetoken.warmup.probes import SAMPLING

sys.path.insert(0, str(Path(__file__).parents[1] / "warmup"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A configuration and no weights: a small Qwen3-MoE."""
    from freetoken.models import qwen3_moe

    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**qwen3_moe.tiny(), "dtype": "bfloat16"}))
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["warmup", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


SMALL = ("--max-prefill-tokens", "40", "--max-running-requests", "4")


# ------------------------------------------------------------------------------------------------ plan


def test_a_plan_for_a_card_that_is_not_here(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without weights and without a GPU; JSON and text tell of the same steps."""
    pytest.importorskip("freetoken_kernels_triton")
    monkeypatch.setenv("FREETOKEN_CACHE_DIR", str(tmp_path / "cache"))
    code, out, _ = run(capsys, "plan", str(model), "--target", "h200", "--json", *SMALL)
    plan = json.loads(out)
    assert code == 0
    assert plan["device"] == "NVIDIA H200"
    assert plan["kinds"]["layers.0"] == ["layers.0", "layers.1"], "two layers, one kind"
    steps = [step["step"] for step in plan["steps"]]
    assert steps[:2] == ["CompileKeys", "LoadKeys"]
    assert set(plan["steps"][0]["keys"]) == set(plan["keys"])
    assert plan["uncovered"] == []
    assert all(step["expected_seconds"] > 0 and step["covers"] for step in plan["steps"])
    code, out, _ = run(capsys, "plan", str(model), "--target", "cuda:90,sms=132", *SMALL)
    assert code == 0
    assert f"{len(plan['keys'])} keys" in out
    assert "layers.0 (×2)" in out
    assert "every key that a step can need is covered" in out
    assert plan["opaque"] == []
    assert "undeclared" not in out
    assert any(name.startswith("embedding ") for name in plan["libraries"])


def test_a_low_cap_lists_what_it_leaves(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("freetoken_kernels_triton")
    monkeypatch.setenv("FREETOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FREETOKEN_WARMUP_MAX_LEN", "2")
    words = ("plan", str(model), "--target", "h200", *SMALL)
    _, out, _ = run(capsys, *words)
    missing = json.loads(run(capsys, *words, "--json")[1])["uncovered"]
    assert missing
    assert f"not covered: {len(missing)} keys" in out
    assert "from steps of 5 tokens" in out


def test_a_plan_for_this_machines_cpu_is_one_small_forward(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREETOKEN_CACHE_DIR", str(tmp_path / "cache"))
    code, out, _ = run(capsys, "plan", str(model), "--device", "cpu", "--json")
    assert code == 0
    assert [step["step"] for step in json.loads(out)["steps"]] == ["Forward"]


def test_an_unknown_card_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", str(model), "--target", "voodoo2")
    assert code == 2
    assert "cuda:90,sms=132" in err
    assert "Traceback" not in err


# ------------------------------------------------------------------------------------------------ compile


@pytest.mark.slow
def test_a_folder_is_filled_moved_and_found_full(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: Triton's own count of what it compiled. Its group files hold absolute paths; moving breaks them."""
    pytest.importorskip("freetoken_kernels_triton")
    monkeypatch.setenv("FREETOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FREETOKEN_WARMUP_MAX_LEN", "1")
    first, second = tmp_path / "first", tmp_path / "second"
    words = ("compile", str(model), "--target", "h200", "--json", *SMALL)
    code, out, _ = run(capsys, *words, "--output", str(first))
    filled = json.loads(out)
    assert (code, filled["failed"], filled["in_cache"]) == (0, {}, 0)
    assert filled["compiled"] > 10
    shutil.move(first, second)
    code, out, _ = run(capsys, *words, "--output", str(second))
    again = json.loads(out)
    assert (code, again["compiled"], again["in_cache"]) == (0, 0, filled["compiled"])
    assert again["moved"] == filled["compiled"]
    assert not any(str(first) in path.read_text() for path in second.glob("*/__grp__*.json"))


def test_there_is_nothing_to_compile_for_a_cpu(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREETOKEN_CACHE_DIR", str(tmp_path / "cache"))
    code, _, err = run(capsys, "compile", str(model), "--device", "cpu")
    assert code == 2
    assert "--target h200" in err


# ------------------------------------------------------------------------------------------------ verify


class Served:
    """A server that knows no warmup. ``slow`` bodies take long the first time; ``late`` ones count a load."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.counters = {"freetoken_late_compiles_total": 0, "freetoken_late_loads_total": 0}
        self.slow_tokens = self.late_tokens = self.refused_tokens = -1
        self.fingerprint = "f" * 64
        self.profile: list[dict[str, Any]] = []  # answers still to give; without any the endpoint is not offered
        self.on_probe: Callable[[int], None] = lambda _: None

    def complete(self, body: dict[str, Any]) -> int:
        self.bodies.append(body)
        self.on_probe(len(self.bodies))
        if body["max_tokens"] == 1:
            return 200
        prompt = body["prompt"] if isinstance(body["prompt"][0], int) else body["prompt"][0]
        if len(prompt) == self.refused_tokens:
            return 400
        if len(prompt) == self.slow_tokens:
            self.slow_tokens = -1
            time.sleep(0.4)
        if len(prompt) == self.late_tokens:
            self.late_tokens = -1
            self.counters["freetoken_late_loads_total"] += 1
        return 200


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, str]]:
    monkeypatch.setattr("freetoken.cli.warmup_prober._SETTLE_S", 0.0)
    state = Served()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/health":
                limits = {
                    "max_seq_tokens": 60, "max_prefill_tokens": 24, "max_running_requests": 3, "kv_tokens": 600,
                    "page_tokens": 16, "vocab_size": 500,
                }  # fmt: skip
                report = {"status": "ok", "model": "m", "warmup_fingerprint": state.fingerprint, "limits": limits}
                self.answer(200, json.dumps(report).encode())
            elif self.path == "/metrics":
                self.answer(200, "".join(f"{n} {v}.0\n" for n, v in state.counters.items()).encode())
            else:
                self.answer(200, b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/warmup/profile":
                answer = state.profile.pop(0) if state.profile else None
                self.answer(404 if answer is None else 200, json.dumps(answer).encode())
            else:
                self.answer(state.complete(body), b"{}")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield state, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_every_probe_is_sent_four_times_and_its_first_touch_once(served: tuple[Served, str]) -> None:
    state, url = served
    certificate = Prober(url, None).run(30, 0, lambda *_: None)
    assert certificate.probes == 30
    touches = [body for body in state.bodies if body["max_tokens"] > 1]
    assert len(touches) == 4 * 30
    prompts = [json.dumps(body["prompt"]) for body in touches if len(json.dumps(body["prompt"])) > 30]
    assert len(set(prompts)) == len(prompts), "a repeated prompt would be found in the prefix cache"
    assert certificate.fingerprint == state.fingerprint
    assert "only 30 probes; a certificate needs 200" in certificate.failures


def test_all_ways_through_the_sampler_are_asked_for(served: tuple[Served, str]) -> None:
    state, url = served
    Prober(url, None).run(60, 0, lambda *_: None)
    asked = [{k: v for k, v in b.items() if k not in ("prompt", "max_tokens", "ignore_eos")} for b in state.bodies]
    assert all(dict(sampling) in asked for sampling in SAMPLING.values())


def test_a_late_load_is_found_by_its_counter(served: tuple[Served, str]) -> None:
    state, url = served
    state.late_tokens = 23
    certificate = Prober(url, None).run(60, 0, lambda *_: None)
    assert "1 late loads during the probes" in certificate.failures


def test_a_slow_first_touch_is_found_by_the_clock(served: tuple[Served, str]) -> None:
    """What no counter sees: a library's lazy start."""
    state, url = served
    state.slow_tokens = 23
    certificate = Prober(url, None).run(60, 0, lambda *_: None)
    assert 23 in [slow["new"] + slow["prefix"] for slow in certificate.slow]


def test_a_refused_probe_ends_the_verification(
    served: tuple[Served, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, url = served
    state.refused_tokens = 17
    code, _, err = run(capsys, "verify", url, "--cache-dir", str(tmp_path), "--probes", "60")
    assert code == 1
    assert "status 400" in err


def test_a_certificate_goes_into_the_manifest_of_the_start_that_was_probed(
    served: tuple[Served, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, url = served
    fingerprint = take_fingerprint(planned(llama.tiny(), dtype="float32").plan, {})
    ManifestStore(tmp_path).write(Manifest(fingerprint, model="m", written="2026-01-01T00:00:00Z"))
    state.fingerprint = fingerprint.digest
    code, out, _ = run(capsys, "verify", url, "--cache-dir", str(tmp_path), "--probes", "5")
    assert code == 1, "five probes are no certificate"
    assert "only 5 probes" in out
    found = ManifestStore(tmp_path).find("m", fingerprint).manifest
    assert found is not None
    assert found.certificate is not None
    assert found.certificate["probes"] == 5
    assert "certificate: does not pass, 5 probes" in run(capsys, "report", "--cache-dir", str(tmp_path))[1]


def test_a_server_elsewhere_leaves_its_certificate_beside_the_manifests(
    served: tuple[Served, str], tmp_path: Path
) -> None:
    _, url = served
    certificate = Prober(url, None).run(3, 0, lambda *_: None)
    path = store(tmp_path, certificate)
    assert json.loads(path.read_text())["probes"] == 3
    assert ManifestStore(tmp_path).paths() == ()


def test_a_server_that_tells_no_limits_is_refused(
    served: tuple[Served, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = served
    monkeypatch.setattr(Prober, "_json", lambda self, path: {"status": "loading"})
    code, _, err = run(capsys, "verify", url, "--cache-dir", str(tmp_path))
    assert code == 1
    assert "tells no limits" in err


def on_a_device(state: Served) -> None:
    state.counters['freetoken_engine_events_total{name="device_used_bytes"}'] = 5


def test_further_probes_are_sent_once_each_under_the_profiler(served: tuple[Served, str]) -> None:
    state, url = served
    on_a_device(state)
    record = {"on": False, "events": {"Lazy Function Loading": 3}, "seen": 70}
    state.profile = [{"on": True, "events": {}, "seen": 0}, record]
    found = Prober(url, None).run(5, 0, lambda *_: None, profiled=8)
    assert found.evidence == Evidence(8, {"Lazy Function Loading": 3}, 70)
    assert "3 × Lazy Function Loading in the profiler's record of 8 probes" in found.failures
    assert len([body for body in state.bodies if body["max_tokens"] > 1]) == 8 + 4 * 5


def test_a_device_without_a_record_is_not_certified_and_says_what_to_do(served: tuple[Served, str]) -> None:
    state, url = served
    on_a_device(state)
    found = Prober(url, None).run(5, 0, lambda *_: None)
    assert any("start it with --profile-endpoint" in failure for failure in found.failures)
    state.profile = [{"on": True, "why": "CUPTI is busy"}]
    found = Prober(url, None).run(5, 0, lambda *_: None)
    assert "no profiler evidence: CUPTI is busy" in found.failures


def test_a_cpu_needs_no_record(served: tuple[Served, str]) -> None:
    state, url = served
    state.profile = [{"on": True, "why": "a CPU loads no modules"}]
    assert Prober(url, None).run(5, 0, lambda *_: None).evidence is None


def test_a_signal_leaves_what_was_proven_and_the_manifest_alone(
    served: tuple[Served, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM comes amid a probe, twice, as ``timeout`` sends it."""
    state, url = served
    fingerprint = take_fingerprint(planned(llama.tiny(), dtype="float32").plan, {})
    manifest = Manifest(fingerprint, model="m", written="2026-01-01T00:00:00Z", certificate={"passes": True})
    ManifestStore(tmp_path).write(manifest)
    state.fingerprint = fingerprint.digest

    def kill(sent: int) -> None:
        if sent in (60, 61):
            os.kill(os.getpid(), signal.SIGTERM)

    state.on_probe = kill
    earlier = signal.getsignal(signal.SIGTERM)
    code, out, err = run(capsys, "verify", url, "--cache-dir", str(tmp_path), "--probes", "100")
    assert code == 1
    assert signal.getsignal(signal.SIGTERM) is earlier
    assert "m: not certified for prompts up to" in out
    assert re.search(r"stopped after 1\d of 100 probes: SIGTERM came", out)
    assert "SIGTERM came" in err
    kept = ManifestStore(tmp_path).find("m", fingerprint).manifest
    assert kept is not None
    assert kept.certificate == {"passes": True}


def test_a_signal_while_the_server_ends_takes_nothing_away(
    served: tuple[Served, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is one that is there; its end is where the signal comes."""
    _, url = served

    @contextmanager
    def ends_slowly(*_: object) -> Iterator[str]:
        yield url
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(warmup_verify, "_server", ends_slowly)
    code, out, _ = run(capsys, "verify", "a-model", "--cache-dir", str(tmp_path), "--probes", "4")
    assert code == 1
    assert "4 probes in" in out
    assert "stopped" not in out


def test_a_signal_before_the_server_is_ready_says_how_far_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def starts_slowly(_: object, __: object, progress: ProbeProgress, ___: object) -> Iterator[str]:
        progress.say("server: weights 3 of 9")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        yield ""

    monkeypatch.setattr(warmup_verify, "_server", starts_slowly)
    code, out, err = run(capsys, "verify", "a-model", "--cache-dir", str(tmp_path))
    assert code == 1
    assert out.startswith("not certified: 0 of 200 probes: SIGTERM came; the last that was heard: server: weights 3 of")
    assert "verify: server: weights 3 of 9" in err


def test_the_time_that_is_given_ends_it(
    served: tuple[Served, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, url = served
    code, out, _ = run(capsys, "verify", url, "--cache-dir", str(tmp_path), "--time-limit", "0", "--json")
    assert code == 1
    assert json.loads(out)["stopped"] == "stopped after 0 of 200 probes: the time that was given is over"


def test_a_server_that_dies_leaves_what_was_proven(served: tuple[Served, str], monkeypatch: pytest.MonkeyPatch) -> None:
    state, url = served
    prober = Prober(url, None)
    request = prober._request

    def dying(method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        if len(state.bodies) > 50:
            raise ConnectionRefusedError("nobody listens")
        return request(method, path, body)

    monkeypatch.setattr(prober, "_request", dying)
    found = prober.run(100, 0, lambda *_: None)
    assert found.probes > 5
    assert "nobody listens; the counters could not be read again" in found.failures[0]


def test_progress_is_told_where_there_is_no_terminal(served: tuple[Served, str]) -> None:
    """Oracle: a clock by hand, which a probe advances by half a second: a line every three, with what is left."""
    _, url = served
    out, now = io.StringIO(), [0.0]

    def clock() -> float:
        return now[0]

    progress = ProbeProgress(out, 40, clock)

    def tell(done: int, share: float, words: str) -> None:
        progress(done, share, words)
        now[0] += 0.5

    Prober(url, None).run(40, 0, tell)
    lines = out.getvalue().splitlines()
    assert len(lines) == 7
    assert re.fullmatch(r"verify: probe 0 of 40, 0 s: .* tokens × \d+, .*", lines[0])
    left = [int(re.search(r"about (\d+) s left", line)[1]) for line in lines[1:]]  # type: ignore[index]
    assert left == sorted(left, reverse=True)
    assert lines[-1].startswith("verify: probe 36 of 40, 18 s")


def test_a_servers_phases_and_warnings_are_told_and_details_are_not(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log, path.open("rb") as reading:
        tail = LogTail(reading.fileno())
        log.write(b"weights 3 of 9\n2026-01-01 00:00:00,1 INFO freetoken.x: detail\n  curl it\n2026-01-0")
        log.flush()
        assert tail.news() == ["weights 3 of 9"]
        log.write(b"1 00:00:00,2 WARNING freetoken.x: look\nTraceback\n")
        log.flush()
        assert tail.news() == ["2026-01-01 00:00:00,2 WARNING freetoken.x: look", "Traceback"]
        assert tail.news() == []


def test_the_server_to_verify_gets_the_flags_that_were_given() -> None:
    plugins = build_plugins(Selection(), __import__("freetoken.builtin").builtin.BUILTINS)
    table = OptionTable.of(plugins.catalogs.options)
    flags = [
        FlagValue("--max-seq-len", "64"), FlagValue("--prefix-cache", False), FlagValue("--kernel", "rope=torch"),
        FlagValue("--kernel", "sample=torch"), FlagValue("--port", "99"),
    ]  # fmt: skip
    settings = merge(
        table, flags=flags, environment={"FREETOKEN_DTYPE": "float32"}, file={}, file_name="-", records=plugins.records
    )
    words = given_flags(settings, table, "smollm2", 1234)
    text = " ".join(words)
    assert "--max-seq-len 64" in text
    assert "--no-prefix-cache" in text
    assert "--kernel rope=torch --kernel sample=torch" in text
    assert text.endswith("--model smollm2 --host 127.0.0.1 --port 1234")
    assert "dtype" not in text, "the environment reaches the server by itself"


# ------------------------------------------------------------------------------------------------ report


def test_a_report_says_seconds_keys_and_what_was_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Manifest(
        take_fingerprint(planned(llama.tiny(), dtype="float32").plan, {}),
        model="m",
        written="2026-01-01T00:00:00Z",
        compiled={"pkg:kernel|a": "", "pkg:kernel|b": "", "pkg:other|a": ""},
        proven=True,
        late=(LateNote(StepPoint(33, 1, 33, 33, 1, decode=False), ("load of a_kernel",)),),
        seconds={"compile": 3.5, "load": 0.25},
        kernel_seconds={"pkg:kernel": 3.0, "pkg:other": 0.5},
    )
    ManifestStore(tmp_path).write(manifest)
    (tmp_path / "warmup" / "broken.json").write_text("{")
    code, out, _ = run(capsys, "report", "--cache-dir", str(tmp_path))
    assert code == 0
    assert "compile 3.50 s, load 0.25 s" in out
    assert out.index("pkg:kernel") < out.index("pkg:other"), "the dearest first"
    assert "  2 keys     3.00 s compiling" in out
    assert "forward of 33 tokens in 1 sequence: load of a_kernel" in out
    assert "certificate: none" in out
    assert "ignored: broken.json is damaged" in out
    data = json.loads(run(capsys, "report", "--cache-dir", str(tmp_path), "--json")[1])
    assert data[0]["late"][0]["events"] == ["load of a_kernel"]
    assert "no manifest of x" in run(capsys, "report", "x", "--cache-dir", str(tmp_path))[1]
