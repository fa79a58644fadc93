"""What the machine is: probed once, frozen, handed to every decision."""

from __future__ import annotations

from attrs import field, frozen


@frozen
class Device:
    """One compute device.

    ``kind`` is ``"cpu"`` or ``"cuda"``; the CUDA-only facts are 0 or empty on a CPU. Memory is in bytes and is what
    the device had when it was probed, before FreeToken took any.
    """

    kind: str = "cpu"
    index: int = 0
    name: str = "cpu"
    compute_capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    shared_memory_bytes: int = 0
    memory_total_bytes: int = 0
    memory_free_bytes: int = 0

    @property
    def torch_name(self) -> str:
        """The name torch gives this device: ``cpu`` or ``cuda:0``."""
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def arch(self) -> int:
        """Compute capability as one integer, 90 for 9.0; 0 on a CPU."""
        return self.compute_capability[0] * 10 + self.compute_capability[1]


@frozen
class Hardware:
    """The host and its accelerators.

    ``cores`` counts the ones this process may really use (affinity and cgroup). ``accelerator_problem`` says why there
    is no accelerator, and ``accelerator_fix`` what would help; both are empty where there is one.
    """

    cores: int = 1
    host_total_bytes: int = 0
    host_free_bytes: int = 0
    accelerators: tuple[Device, ...] = field(default=())
    accelerator_problem: str = ""
    accelerator_fix: str = ""

    @property
    def cpu(self) -> Device:
        return Device(memory_total_bytes=self.host_total_bytes, memory_free_bytes=self.host_free_bytes)

    def device(self, kind: str) -> Device | None:
        """The first device of ``kind``, or ``None``."""
        if kind == "cpu":
            return self.cpu
        return next((d for d in self.accelerators if d.kind == kind), None)
