"""FreeToken's CPU products over GGUF blocks, through LLVM."""

__version__ = "0.1.0"
