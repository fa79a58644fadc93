"""Shows a start as it goes: a progress bar on a terminal, a line a phase elsewhere, and the first thing to try."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from freetoken.serve.supervisor import SERVING, EngineStatus


class StartProgress:
    """``show`` is called with every change of the engine's status."""

    def __init__(self, out: TextIO, name: str, url: str) -> None:
        self._out = out
        self._name = name
        self._url = url
        self._phase = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def show(self, status: EngineStatus) -> None:
        if status.phase == SERVING:
            self._stop_bar()
            if self._phase != SERVING:
                self._greet(status)
        elif status.reason and status.phase != self._phase:
            self._stop_bar()
            print(f"engine {status.phase}: {status.reason}", file=self._out, flush=True)
        elif self._out.isatty():
            self._draw(status)
        elif status.phase != self._phase:
            print(f"{status.phase} {status.detail}".rstrip(), file=self._out, flush=True)
        self._phase = status.phase

    def _draw(self, status: EngineStatus) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description:<10}"), BarColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}"),
                console=Console(file=self._out), transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=1.0, detail="")
            self._bar.start()
        if self._task is not None:
            self._bar.update(self._task, description=status.phase, completed=status.fraction, detail=status.detail)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _greet(self, status: EngineStatus) -> None:
        ready = status.ready
        took = f" after {ready.seconds:.1f} s" if ready is not None else ""
        limits = f", contexts up to {ready.max_seq_tokens} tokens" if ready is not None else ""
        print(
            f"{self._name} is ready at {self._url}{took}{limits}. Try:\n"
            f"  curl {self._url}/v1/chat/completions -H 'content-type: application/json' \\\n"
            f'    -d \'{{"model": "{self._name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'',
            file=self._out,
            flush=True,
        )
