"""Paged attention in Triton."""

__version__ = "0.1.0"
