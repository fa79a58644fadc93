"""Specialisation keys as text: ``module:function|`` and Triton's own in-memory key, or ``native:`` and a name."""

from __future__ import annotations

import hashlib

from freetoken.vocab.launch import NativeModule

NATIVE = "native:"


def native_key(module: NativeModule) -> str:
    """The key of a module that a library builds for itself."""
    return f"{NATIVE}{module.name}"


def is_native(key: str) -> bool:
    return key.startswith(NATIVE)


def kernel_of(key: str) -> str:
    """The kernel a key belongs to: ``module:function``, or the native module's name."""
    return key.removeprefix(NATIVE) if is_native(key) else key.partition("|")[0]


def short(key: str) -> str:
    """A key for people: the function's name and eight digits that tell its keys apart."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return f"{kernel_of(key).rpartition(':')[2]}#{digest}"
