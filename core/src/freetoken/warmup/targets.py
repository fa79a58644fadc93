"""Cards to plan and compile for where they are not there: by name, or by what kernels depend on."""

from __future__ import annotations

import re
from collections.abc import Mapping

from freetoken.vocab.errors import UsageError
from freetoken.vocab.hardware import Device
from freetoken.vocab.units import GIB, KIB, format_bytes, parse_bytes

# Name: product, compute capability, multiprocessors, shared memory of one block in KiB, memory in GiB.
# Source: NVIDIA's architecture white papers, and the CUDA programming guide for shared memory by capability.
_CARDS: Mapping[str, tuple[str, tuple[int, int], int, int, int]] = {
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163, 80),
    "rtx3060": ("NVIDIA GeForce RTX 3060", (8, 6), 28, 99, 12),
    "rtx3090": ("NVIDIA GeForce RTX 3090", (8, 6), 82, 99, 24),
    "l4": ("NVIDIA L4", (8, 9), 58, 99, 24),
    "l40s": ("NVIDIA L40S", (8, 9), 142, 99, 48),
    "rtx4060ti": ("NVIDIA GeForce RTX 4060 Ti", (8, 9), 34, 99, 16),
    "rtx4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128, 99, 24),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 227, 80),
    "h200": ("NVIDIA H200", (9, 0), 132, 227, 141),
    "b200": ("NVIDIA B200", (10, 0), 148, 227, 180),
    "rtx5070ti": ("NVIDIA GeForce RTX 5070 Ti", (12, 0), 70, 99, 16),
    "rtx5080": ("NVIDIA GeForce RTX 5080", (12, 0), 84, 99, 16),
    "rtx5090": ("NVIDIA GeForce RTX 5090", (12, 0), 170, 99, 32),
}

_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
UNKNOWN_MEMORY_BYTES = 1024 * GIB
"""Of a card given by its numbers alone: a plan must not be refused for memory that nobody named."""

_FORM = re.compile(r"cuda:(\d{2,3})((?:,[a-z]+=[^,]+)*)")


def target_names() -> tuple[str, ...]:
    return tuple(_CARDS)


def parse_target(text: str) -> Device:
    """``h200``, or ``cuda:90,sms=132`` with ``shared=`` and ``memory=`` in bytes where they are not the usual.

    Raises ``UsageError`` for anything else, with the names there are.
    """
    word = text.strip().lower()
    if word in _CARDS:
        name, capability, multiprocessors, shared_kib, memory_gib = _CARDS[word]
        memory = memory_gib * GIB
        return Device("cuda", 0, name, capability, multiprocessors, shared_kib * KIB, memory, memory)
    found = _FORM.fullmatch(word)
    if found is None:
        raise _refusal(text, f"it is neither a known card ({', '.join(_CARDS)}) nor of the form cuda:90,sms=132")
    arch = int(found[1])
    given = dict(pair.split("=", 1) for pair in found[2].split(",") if pair)
    unknown = set(given) - {"sms", "shared", "memory"}
    if unknown or "sms" not in given:
        raise _refusal(text, f"{min(unknown)}= is not known" if unknown else "sms=, the multiprocessors, is missing")
    try:
        multiprocessors = int(given["sms"])
        shared = parse_bytes(given["shared"]) if "shared" in given else _SHARED_KIB.get(arch, 99) * KIB
        memory = parse_bytes(given["memory"]) if "memory" in given else UNKNOWN_MEMORY_BYTES
    except ValueError as error:
        raise _refusal(text, str(error)) from None
    if multiprocessors < 1:
        raise _refusal(text, f"{multiprocessors} multiprocessors")
    name = f"cuda {arch // 10}.{arch % 10} with {multiprocessors} multiprocessors"
    return Device("cuda", 0, name, divmod(arch, 10), multiprocessors, shared, memory, memory)


def _refusal(text: str, found: str) -> UsageError:
    return UsageError(f"--target {text}", found, "use for example --target h200 or --target cuda:90,sms=132")


def describe_target(device: Device) -> str:
    """``NVIDIA H200 (compute capability 9.0, 132 multiprocessors, 141.0 GiB)``."""
    capability = ".".join(map(str, device.compute_capability))
    memory = "" if device.memory_total_bytes >= UNKNOWN_MEMORY_BYTES else f", {format_bytes(device.memory_total_bytes)}"
    return f"{device.name} (compute capability {capability}, {device.multiprocessors} multiprocessors{memory})"
