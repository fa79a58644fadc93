"""FlashInfer's paged attention."""

__version__ = "0.1.0"
