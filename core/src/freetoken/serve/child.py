"""The engine process as its parent starts it: what happens between the spawn and the worker's own code.

The child must not outlive the HTTP process. On Linux the kernel kills it when the parent dies
(``prctl(PR_SET_PDEATHSIG)``); everywhere the worker's next ``recv`` on the connection raises ``EOFError``, since the
parent held the only other end. Ctrl-C and SIGTERM reach a whole process group; the child leaves them to the parent,
which drains and then ends it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1

WorkerTarget = str | Callable[[Connection, object], None]
"""What the child runs: a function, or its name ``module:function``, which only the child then imports."""


def run_worker(target: WorkerTarget, conn: Connection, start: object, parent_pid: int) -> None:
    """The child's first function: tie its life to the parent's, then call ``target(conn, start)``."""
    die_with_parent(parent_pid)
    # A Python handler, not SIG_IGN: an ignored signal would be inherited by the child's own children.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_parent)
    resolve_target(target)(conn, start)


def resolve_target(target: WorkerTarget) -> Callable[[Connection, object], None]:
    """``"module:function"`` → the function; a function is returned as it is."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    found: Callable[[Connection, object], None] = getattr(importlib.import_module(module), name)
    return found


def die_with_parent(parent_pid: int) -> None:
    """Tie this process's life to that of the one that started it, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _leave_to_parent(_number: int, _frame: object) -> None:
    """The parent decides when the engine stops."""
