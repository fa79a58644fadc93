"""The kernels' results on a CPU, in one process of Triton's interpreter: the switch acts when a kernel is decorated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_the_backend_conforms_in_the_interpreter() -> None:
    """Oracles: naive softmax in float64, and in float32 over long contexts; see ``conformance_interpreted.py``."""
    file = Path(__file__).with_name("conformance_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
