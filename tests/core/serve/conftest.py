"""Makes ``serve_fake_worker`` importable here and in the processes that are spawned from here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
