"""Servers for the tests in this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from serve_bench import Served, serve


@pytest.fixture(scope="session")
def start_server() -> Callable[..., AbstractContextManager[Served]]:
    """Starts a server of one's own."""
    return serve


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for a whole file; nothing in the file may break it."""
    with serve() as running:
        yield running
