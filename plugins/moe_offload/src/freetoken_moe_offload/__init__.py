"""Experts in host memory with a cache of slots on the device."""

__version__ = "0.1.0"
