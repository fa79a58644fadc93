"""Kernels in Triton's interpreter: only in a process of their own, since the switch acts when a kernel is decorated.

``../test_interpreter.py`` starts that process.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
