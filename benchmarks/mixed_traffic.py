"""Mixed traffic for a server: batches, shared prefixes, every way through the sampler, streams that are broken off.

What is asked comes from a seeded generator; how requests meet is left to the threads that send them.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from typing import Any

from attrs import define, field, frozen

from freetoken.cli.warmup_prober import server_limits
from freetoken.warmup.probes import SAMPLING, ServerLimits, tokens

CANCELLED_SHARE = 0.12
MOST_ANSWER_TOKENS = 48


@frozen
class Wish:
    """One request: its body, whether it is streamed, and after how many pieces it is broken off (0: never)."""

    kind: str
    body: dict[str, Any]
    stop_after: int = 0


class Wishes:
    """Draws requests; a few prefixes are shared by many."""

    def __init__(self, limits: ServerLimits, seed: int) -> None:
        self._limits = limits
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        longest = self._longest
        self._prefixes = [
            tokens(self._chance, max(1, min(n, longest // 2)), limits.vocabulary) for n in (16, 100, 513, 2048)
        ]
        self._routes = 0

    @property
    def _longest(self) -> int:
        """Of a prompt: also beyond a chunk, and short enough that the traffic stays mixed."""
        return max(2, min(self._limits.longest - MOST_ANSWER_TOKENS, 2 * self._limits.chunk))

    def next(self) -> Wish:
        """Routes take turns, so that all of them are met; the rest is chance."""
        with self._lock:
            chance = self._chance
            names = list(SAMPLING)
            route = names[self._routes % len(names)]
            self._routes += 1
            batch = chance.choice((1, 1, 1, 2, 3, 5))
            prompts = [self._prompt(batch) for _ in range(batch)]
            most = chance.randint(1, min(MOST_ANSWER_TOKENS, max(1, self._limits.longest - max(map(len, prompts)))))
            body = {
                "prompt": prompts if batch > 1 else prompts[0], "max_tokens": most, "ignore_eos": True,
                **SAMPLING[route],
            }  # fmt: skip
            if chance.random() >= CANCELLED_SHARE:
                return Wish(route, body)
            body |= {"stream": True, "max_tokens": min(MOST_ANSWER_TOKENS, self._limits.longest - self._longest)}
            return Wish("cancelled", body, stop_after=chance.randint(1, 4))

    def _prompt(self, batch: int) -> list[int]:
        longest = max(1, self._longest // batch)
        total = min(longest, int(2 ** self._chance.uniform(0, longest.bit_length())))
        prefix = self._chance.choice([[], [], *self._prefixes])[: max(0, total - 1)]
        return [*prefix, *tokens(self._chance, max(1, total - len(prefix)), self._limits.vocabulary)]


@define
class Counted:
    """How many requests of each kind ended well, and the first words of those that did not."""

    kinds: Counter[str] = field(factory=Counter)
    errors: list[str] = field(factory=list)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        done = sum(self.kinds.values())
        return {
            "requests": done, "routes": len(self.kinds), "cancelled": self.kinds["cancelled"],
            "errors": len(self.errors), "first_error": self.errors[0][:200] if self.errors else "",
            "seconds": round(self.seconds, 1),
        }  # fmt: skip


def run_mixed(url: str, seconds: float, workers: int, seed: int = 0) -> Counted:
    """Send from ``workers`` threads for so long, then let what runs come to its end."""
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        wishes = Wishes(server_limits(json.loads(answer.read())), seed)
    counted, lock, until = Counted(), threading.Lock(), time.monotonic() + seconds

    def send() -> None:
        while time.monotonic() < until:
            wish = wishes.next()
            try:
                _send(url, wish)
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                with lock:
                    counted.errors.append(f"{wish.kind}: {type(error).__name__}: {error}")
                time.sleep(0.2)
                continue
            with lock:
                counted.kinds[wish.kind] += 1

    started = time.perf_counter()
    threads = [threading.Thread(target=send, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 120)
    counted.seconds = time.perf_counter() - started
    return counted


def _send(url: str, wish: Wish) -> None:
    """One request; ``RuntimeError`` for an answer that is none."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(wish.body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read(200).decode(errors='replace')}")
        if not wish.stop_after:
            answer.read()
            return
        for _ in range(2 * wish.stop_after):  # a piece is a line and an empty one
            if not answer.readline():
                return
    finally:
        connection.close()
