"""How much memory the engine's device and its pinned host memory hold: what must not grow once it serves."""

from __future__ import annotations

from freetoken.vocab.hardware import Device


def memory_counters(device: Device) -> tuple[tuple[str, float], ...]:
    """Bytes in use on the whole device as its driver says, and pinned bytes as torch says; nothing on a CPU."""
    if device.kind == "cpu":
        return ()
    import torch

    free, total = torch.cuda.mem_get_info(device.index)
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return (("device_used_bytes", float(total - free)), ("pinned_bytes", float(pinned)))
