"""Building a module in a process of its own, so that the engine does not stall and the compiler's text is kept.

As a program: ``python -m freetoken_attention_flashinfer.build KERNEL DTYPE HEAD_DIM``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from freetoken.vocab.errors import EngineError
from freetoken_attention_flashinfer.kernels import module_name

JOB_BYTES = 3 << 30
"""What one nvcc of these sources may take; as many run at once as fit the free memory."""

JOBS_VARIABLE = "MAX_JOBS"  # read by the library; the user's own value stands
TEXT_LINES = 30
MODULE = "freetoken_attention_flashinfer.build"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def compile_jobs(cores: int, free_bytes: int) -> int:
    """How many compilers run at once: no more than cores, no more than fit the memory, at least one."""
    return max(1, min(cores, free_bytes // JOB_BYTES))


def child_environment(environment: Mapping[str, str], jobs: int) -> dict[str, str]:
    """The child's variables: this process's own, and a number of jobs where the user set none."""
    return {JOBS_VARIABLE: str(jobs), **environment}


def build_in_child(kernel: str, dtype: str, head_dim: int, run: Run = subprocess.run) -> None:
    """Build one module; nothing to do is quick. Raises ``EngineError`` with the end of what the compiler said."""
    from freetoken.memory.hardware import probe_hardware

    host = probe_hardware(accelerators=False)
    environment = child_environment(os.environ, compile_jobs(host.cores, host.host_free_bytes))
    command = [sys.executable, "-m", MODULE, kernel, dtype, str(head_dim)]
    done = run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        said = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
        raise EngineError(
            f"building {module_name(kernel, dtype, head_dim)}",
            "\n".join(said[-TEXT_LINES:]) or f"the builder ended with {done.returncode} and said nothing",
            "serve with --attention-backend triton, or mend what the compiler says",
        )


def main(arguments: Sequence[str]) -> int:
    """The child: build what the three words name, unless it is there."""
    kernel, dtype, head_dim = arguments
    from freetoken_attention_flashinfer.library import build_module

    build_module(kernel, dtype, int(head_dim))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
