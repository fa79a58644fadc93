"""Makes the scripts in ``benchmarks/`` importable, and keeps torch to the test runner's threads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
