"""A long prompt under a cap on device memory: what the process takes, sampled from the driver, against the cap.

    python3 benchmarks/gpu_offload_cap.py [--cap 16GiB] [--prompt 65536] [--kv-tokens 131072] [--layers N] [--json PATH]

``freetoken serve --moe-strategy offload`` with ``--device-memory-bytes`` and random weights of Qwen3.6-35B-A3B's
dimensions, as many layers as host memory allows (a multiple of four, so that every kind of layer is there), serves a
prompt of 64k tokens over HTTP with KV for 128k. From the start to the end a thread asks the driver every 20 ms what
the server's processes take, or, where it does not tell processes apart (in most containers), what the whole device has
in use more than before the start. The largest of these must not be above the cap; exit code 1 otherwise.

``--kind tiny-qwen3.6-moe --device cpu`` tries the script without a GPU: then the processes' resident memory is sampled.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil
from checkpoint_kinds import KINDS, Config, text_config
from gpu_serve import Server, write_model

from freetoken.memory.cgroup import memory_limit
from freetoken.vocab.units import parse_bytes

GIB = 1024**3
PERIOD_S = 0.02
HOST_SHARE = 0.8  # of the host memory that is free: the server itself and its pinned buffers need the rest
LAYERS_STEP = 4


# ------------------------------------------------------------------------------------------- the driver's own count


class Memory(Protocol):
    """Says what is in use now; ``how`` says whose."""

    how: str

    def used_bytes(self) -> int: ...


class _Info(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )  # fmt: skip


class DriverMemory:
    """NVML through its C library, which comes with every driver. Raises ``OSError`` where it is not there."""

    def __init__(self, index: int = 0) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._check(self._library.nvmlInit_v2())
        self._device = ctypes.c_void_p()
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._device)))
        self._before = self._device_used()
        self.largest = {"processes": 0, "device": 0}

    @property
    def how(self) -> str:
        told = self.largest["processes"]
        return "the driver's count of processes" if told else "the device's use above that before the start"

    def used_bytes(self) -> int:
        """The larger of both counts: where both are told, they differ by what no process is charged for."""
        device, processes = self._device_used() - self._before, self._processes_used()
        self.largest["device"] = max(self.largest["device"], device)
        self.largest["processes"] = max(self.largest["processes"], processes)
        return max(device, processes)

    def _device_used(self) -> int:
        info = _Info()
        self._check(self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(info)))
        return int(info.used)

    def _processes_used(self) -> int:
        count = ctypes.c_uint(64)
        found = (_Process * 64)()
        ask = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if ask is None or ask(self._device, ctypes.byref(count), found):
            return 0
        unknown = (1 << 64) - 1
        return sum(int(p.used) for p in found[: count.value] if p.used != unknown)

    def _check(self, code: int) -> None:
        if code:
            raise OSError(f"NVML answered {code}")


class ResidentMemory:
    """What this process's children have resident: stands in for a device, to try the script."""

    how = "resident memory of the processes"

    def used_bytes(self) -> int:
        total = 0
        for child in psutil.Process().children(recursive=True):
            try:
                total += child.memory_info().rss
            except psutil.Error:
                continue
        return total


class Sampler(threading.Thread):
    """The largest use so far, and in which phase it was."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(daemon=True)
        self.memory = memory
        self.phase = "start"
        self.largest: dict[str, int] = {}
        self.samples = 0
        self.longest_pause_s = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        last = time.perf_counter()
        while not self._over.is_set():
            used = self.memory.used_bytes()
            self.largest[self.phase] = max(self.largest.get(self.phase, 0), used)
            self.samples += 1
            now = time.perf_counter()
            self.longest_pause_s = max(self.longest_pause_s, now - last)
            last = now
            self._over.wait(PERIOD_S)

    def stop(self) -> None:
        self._over.set()
        self.join()


# ------------------------------------------------------------------------------------------- sizes


def expert_bytes_a_layer(config: Config) -> int:
    """Experts of one layer in bfloat16."""
    text = text_config(config)
    return int(text["num_experts"] * 3 * text["hidden_size"] * text["moe_intermediate_size"] * 2)


def free_host_bytes(asked: int | None) -> tuple[int, str]:
    """What the host may give: as asked, the control group's limit, or what the system says is available."""
    if asked is not None:
        return asked, "--host-memory-bytes"
    limit, system = memory_limit(), psutil.virtual_memory()
    if limit is not None and limit.free_bytes < max(system.available, 1):
        return limit.free_bytes, "the control group's limit"
    return int(system.available), "available memory"


def choose_layers(config: Config, host_bytes: int) -> int:
    """As many as fit the host's share, in steps of ``LAYERS_STEP``, at most the published number."""
    most = int(text_config(config)["num_hidden_layers"])
    fit = int(host_bytes * HOST_SHARE) // expert_bytes_a_layer(config)
    return max(LAYERS_STEP, min(most, fit // LAYERS_STEP * LAYERS_STEP))


# ------------------------------------------------------------------------------------------- the run


def complete(server: Server, prompt: Sequence[int], tokens: int, timeout_s: float) -> tuple[float, int]:
    """Seconds until the answer was there, and the prompt's tokens as the server counted them."""
    body = {"model": "m", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        found = json.loads(answer.read())
    return time.perf_counter() - started, int(found["usage"]["prompt_tokens"])


def run(given: argparse.Namespace, folder: Path, put: Callable[..., None]) -> bool:
    """Whether the cap held and the prompt was served."""
    config = KINDS[given.kind]
    host_bytes, whose = free_host_bytes(given.host_memory_bytes)
    layers = given.layers or choose_layers(config, host_bytes)
    put("sizes", layers=layers, of=text_config(config)["num_hidden_layers"], host_gib=round(host_bytes / GIB, 1),
        whose=whose, experts_gib=round(layers * expert_bytes_a_layer(config) / GIB, 1),
        cap_gib=round(given.cap / GIB, 2))  # fmt: skip
    directory = folder / "model"
    write_model(given.kind, directory, layers)
    flags = [
        "--load-format", "dummy", "--moe-strategy", "offload", "--device-memory-bytes", str(given.cap), "--device",
        given.device, "--max-seq-len", str(given.kv_tokens), "--kv-tokens", str(given.kv_tokens),
        "--max-running-requests", str(given.running), "--cache-dir", str(folder / "cache"), *given.flags.split(),
    ]  # fmt: skip
    if given.host_memory_bytes is not None:
        flags += ["--host-memory-bytes", str(given.host_memory_bytes)]
    sampler = Sampler(DriverMemory() if given.device == "cuda" else ResidentMemory())
    sampler.start()
    log = (given.logs or folder) / "cap.log"
    server = Server(directory, log, flags)
    served = False
    try:
        put("start", ready_s=round(server.wait_ready(given.ready_timeout), 1))
        for name, tokens in (("short", min(500, given.prompt // 2)), ("long", given.prompt), ("again", given.prompt)):
            sampler.phase = name
            prompt = [20 + (i * i + 31 * len(name) * i) % 200 for i in range(tokens)]
            took, counted = complete(server, prompt, 16, given.timeout)
            put(f"prompt {name}", tokens=counted, seconds=round(took, 2))
        sampler.phase = "after"
        time.sleep(1.2)
        put("moved", **{k: int(v) for k, v in server.moe_counters().items()})
        put("late", **server.late_events())
        served = True
    except Exception as error:
        put("FAILED", error=" ".join(f"{type(error).__name__}: {error}".split())[-600:])
    finally:
        server.stop()
        sampler.stop()
    worst = max(sampler.largest.values(), default=0)
    put("used", how=sampler.memory.how, samples=sampler.samples, longest_pause_ms=round(sampler.longest_pause_s * 1e3),
        **{f"{phase}_gib": round(size / GIB, 3) for phase, size in sampler.largest.items()})  # fmt: skip
    put("cap", cap_bytes=given.cap, largest_bytes=worst, held=worst <= given.cap)
    return served and worst <= given.cap


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=parse_bytes, default=16 * GIB)
    parser.add_argument("--kind", default="qwen3.6-35b-a3b", choices=[k for k in KINDS if "moe" in k or "a3b" in k])
    parser.add_argument("--layers", type=int, help="instead of as many as host memory allows")
    parser.add_argument("--prompt", type=int, default=65_536)
    parser.add_argument("--kv-tokens", type=int, default=131_072)
    parser.add_argument("--running", type=int, default=4, help="--max-running-requests")
    parser.add_argument("--host-memory-bytes", type=parse_bytes, help="where the system tells too little")
    parser.add_argument("--flags", default="", help="further flags of freetoken serve")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one prompt")
    parser.add_argument("--ready-timeout", type=float, default=300.0)
    parser.add_argument("--logs", type=Path, help="where the server's log goes")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    found: dict[str, Any] = {}

    def put(name: str, **values: Any) -> None:
        found[name] = values
        print(f"{name:13}", " ".join(f"{k}={v}" for k, v in values.items()), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        return int(not run(given, Path(folder), put))


if __name__ == "__main__":
    sys.exit(main())
