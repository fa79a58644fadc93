"""Can the strategy run here: on a CPU always, on a GPU with Triton."""

from __future__ import annotations

from importlib.util import find_spec

from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Hardware


def probe(hardware: Hardware) -> Availability:
    """Imports nothing. A GPU is looked up and fetched for by Triton kernels."""
    if hardware.device("cuda") is not None and find_spec("triton") is None:
        return Availability.no("triton is not installed", "pip install 'triton>=3.6'")
    return Availability.yes()
