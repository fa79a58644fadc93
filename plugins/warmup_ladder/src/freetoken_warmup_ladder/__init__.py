"""FreeToken's default warmup. Importing this imports neither torch nor triton."""

__version__ = "0.1.0"
