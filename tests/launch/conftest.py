"""Makes the scripts in ``benchmarks/`` importable: the steps to trace are those of ``trace_launches.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
