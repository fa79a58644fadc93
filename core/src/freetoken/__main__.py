"""``python -m freetoken`` is the program ``freetoken``."""

from __future__ import annotations

import sys

from freetoken.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
