"""Deep probes: run in a child process, since a probe may import a library that crashes or grabs the device."""

from __future__ import annotations

import json
import subprocess
import sys

import attrs

from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Device, Hardware

_CHILD = """
import importlib, json, sys
from freetoken.plugin.probe import _hardware_of
module, _, function = sys.argv[1].partition(":")
answer = getattr(importlib.import_module(module), function)(_hardware_of(json.loads(sys.argv[2])))
print("\\n" + json.dumps([answer.ok, answer.reason, answer.fix]))
"""


def deep_probe(target: str, hardware: Hardware, timeout_s: float = 60.0) -> Availability:
    """Run ``"module:function"`` on ``hardware`` in a child; a crash or a timeout is an unavailability with its text."""
    if not target:
        return Availability.yes()
    command = [sys.executable, "-c", _CHILD, target, json.dumps(attrs.asdict(hardware))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Availability.no(f"its probe did not answer within {timeout_s:g} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Availability.no(f"its probe failed: {last}")
    return _read_answer(done.stdout)


def _read_answer(said: str) -> Availability:
    """The child's last line; where it is no answer, because a library spoke last, it becomes the reason."""
    last = (said.strip().splitlines() or [""])[-1]
    try:
        ok, reason, fix = json.loads(last)
    except (ValueError, TypeError):
        return Availability.no(f"its probe's answer cannot be read: {last[:200] or 'it said nothing'}")
    return Availability(bool(ok), str(reason), str(fix))


def _hardware_of(data: dict[str, object]) -> Hardware:
    devices = []
    for entry in data.pop("accelerators", []):  # type: ignore[attr-defined]
        entry["compute_capability"] = tuple(entry["compute_capability"])
        devices.append(Device(**entry))
    return Hardware(accelerators=tuple(devices), **data)  # type: ignore[arg-type]
