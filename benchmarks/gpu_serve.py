"""Start the server on a model of published dimensions and measure it over HTTP, by ``freetoken bench``'s own client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve
from checkpoint_kinds import KINDS, text_config, with_layers
from make_checkpoint import write_tokenizer

from freetoken.serve.bench.chat import ChatServer
from freetoken.serve.bench.http import Address
from freetoken.serve.bench.measure import measure
from freetoken.serve.bench.plan import BenchPlan
from freetoken.serve.bench.prompts import PromptWriter
from freetoken.serve.bench.results import BenchResult

LENGTHS = (119, 180, 352, 719, 1611, 5427, 12_691)


def write_model(kind: str, directory: Path, layers: int | None = None) -> None:
    """Configuration and tokenizer, no weights."""
    config = with_layers(KINDS[kind], layers)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], "do_sample": False}))
    write_tokenizer(directory, text_config(config)["vocab_size"])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


SERVE = (
    sys.executable,
    "-m",
    "freetoken",
    "serve",
    "--served-model-name",
    "m",
    "--model",
    "{model}",
    "--port",
    "{port}",
)
"""The words that start this server; those in braces are filled in."""


class Server:
    """``freetoken serve`` as a child process, in a session of its own so that all of it can be ended.

    ``command`` starts another server, ``ready_path`` answers 200 once it serves, and while the answer matches
    ``not_ready`` it does not yet.
    """

    def __init__(
        self, directory: Path, log: Path, flags: Sequence[str] = ("--load-format", "dummy"), *,
        command: Sequence[str] = SERVE, environment: Mapping[str, str] | None = None, ready_path: str = "/ready",
        not_ready: str = "",
    ) -> None:  # fmt: skip
        self.port = free_port()
        self.log = log
        self._ready_path, self._not_ready = ready_path, not_ready
        known = {"model": str(directory), "port": str(self.port)}
        command = [word.format_map(known) for word in (*command, *flags)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **(environment or {})}
        self._started = time.perf_counter()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, timeout_s: float) -> float:
        """Seconds from the start until the server says that it serves. Raises ``RuntimeError`` with the log's end."""
        while time.perf_counter() - self._started < timeout_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}: {self.last_words()}")
            try:
                with urllib.request.urlopen(f"{self.url}{self._ready_path}", timeout=2) as answer:
                    text = answer.read().decode(errors="replace")
                    if answer.status == 200 and not (self._not_ready and re.search(self._not_ready, text, re.I)):
                        return time.perf_counter() - self._started
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.1)
        raise RuntimeError(f"not ready within {timeout_s:.0f} s: {self.last_words()}")

    def last_words(self, characters: int = 700) -> str:
        text = self.log.read_text(errors="replace")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)[-characters:]

    def late_events(self) -> dict[str, float]:
        """What the watch counted after the warmup."""
        found = re.findall(r"^freetoken_(late_\w+?)(?:_total)? ([0-9.e+]+)$", self._metrics(), re.MULTILINE)
        return {name: float(value) for name, value in found}

    def moe_counters(self) -> dict[str, float]:
        """What the MoE strategy counts, by name; empty for a server that tells none. A second old at most."""
        line = r'^freetoken_engine_events(?:_total)?\{name="moe_(\w+)"\} ([0-9.e+]+)$'
        return {name: float(value) for name, value in re.findall(line, self._metrics(), re.MULTILINE)}

    def _metrics(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError:  # it has none
            return ""

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
            try:
                self._process.wait(15)
                return
            except subprocess.TimeoutExpired:
                continue


def run_server(
    kind: str, directory: Path, log: Path, *, layers: int | None, flags: Sequence[str], plan: BenchPlan,
    ready_timeout_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Ready, time to first token by length, one stream, many streams: as plain data."""
    write_model(kind, directory, layers)
    server = Server(directory, log, ("--load-format", "dummy", *flags))
    found: dict[str, Any] = {
        "model": kind,
        "layers": text_config(with_layers(KINDS[kind], layers))["num_hidden_layers"],
    }
    try:
        found["ready_s"] = round(server.wait_ready(ready_timeout_s), 2)
        for part in (evolve(plan, decode_tokens=0), evolve(plan, lengths=())):
            found |= figures(asyncio.run(measured(server.url, part, {"ignore_eos": True})))
            found["late"] = server.late_events()
    except (Exception, SystemExit) as error:  # the figures so far are still worth having
        found["error"] = f"{type(error).__name__}: {error}"[:1200]
    finally:
        server.stop()
    return found


async def measured(url: str, plan: BenchPlan, extra: Mapping[str, object]) -> BenchResult:
    """``plan`` on the server at ``url``; ``extra`` goes into every request."""
    server = await ChatServer.find(Address.parse(url), "m", extra, None, 120.0)
    return await measure(server, await PromptWriter.for_server(server, None), plan, lambda *_: None)


def figures(result: BenchResult) -> dict[str, Any]:
    """The figures that ``docs/benchmarks.md`` compares."""
    found: dict[str, Any] = {}
    if result.lengths:
        found["ttft_tokens_first_again_s"] = [
            [x.prompt_tokens, round(x.first_s, 4), round(x.again_median_s, 4)] for x in result.lengths
        ]
    if result.decode is not None:
        found["decode_tok_s"] = round(result.decode.tok_s, 1)
        gap = result.decode.gap_s
        found["gap_ms_p50_p99"] = None if gap is None else [round(gap.p50 * 1000, 2), round(gap.p99 * 1000, 2)]
    for load in result.load:
        ttft = load.ttft_s
        found[f"streams_{load.streams}"] = {
            "out_tok_s": round(load.out_tok_s, 1), "refused": load.refused,
            "ttft_p50_s": None if ttft is None else round(ttft.p50, 3), "first_error": load.first_error[:200],
        }  # fmt: skip
    return found
