"""A child of ``cpu.py``: one engine in this process, driven by JSON lines on standard input.

    python cpu_worker.py freetoken MODEL | python cpu_worker.py transformers DIR float32|bfloat16

It answers ``{"ready": true}`` once loaded, then one line a command: ``decode`` and ``prefill`` in tokens a second,
``answers`` with token sequences, ``logits`` written to a file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

PROMPT_TOKENS = 16
FIRST_TOKEN, LAST_TOKEN = 10, 300  # ordinary tokens, of small vocabularies too


class Engine(Protocol):
    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        """Tokens a second over all prompts once each has its first token."""
        ...

    def prefill(self, prompt: list[int]) -> float:
        """Tokens a second to the first token."""
        ...

    def logits(self, tokens: Sequence[int]) -> Any:
        """``[T, V]`` float32."""
        ...


class Freetoken:
    """``freetoken.LLM`` with what ``freetoken serve`` takes by default."""

    def __init__(self, model: str) -> None:
        from accuracy import freetoken_logits

        import freetoken

        self.llm = freetoken.LLM(model, max_seq_len=1024, kv_tokens=8 * 1024, prefix_cache=False, device="cpu")
        self.logits = freetoken_logits(self.llm)
        self._number = 0

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        core = self._submit(prompts, tokens)
        seen = dict.fromkeys((r.request_id for r in core.scheduler.waiting), 0)
        start = done = 0
        began = ended = 0.0
        while not core.idle:
            for output in core.step():
                seen[output.request_id] += len(output.tokens)
            ended = time.perf_counter()
            if not began and all(seen.values()):
                began, start = ended, sum(seen.values())
            done = sum(seen.values())
        return (done - start) / (ended - began)

    def prefill(self, prompt: list[int]) -> float:
        core = self._submit([prompt], 1)
        start = time.perf_counter()
        while not core.idle:
            core.step()
        return len(prompt) / (time.perf_counter() - start)

    def answers(self) -> list[tuple[list[int], int]]:
        from accuracy import answers

        return answers(self.llm)

    def _submit(self, prompts: list[list[int]], tokens: int) -> Any:
        from freetoken.vocab.sampling import SamplingParams

        core = self.llm.running.core
        for prompt in prompts:
            self._number += 1
            core.submit(
                f"bench-{self._number}", prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            )
        return core


class Transformers:
    """A greedy loop over the model with its own cache; lighter than ``generate``."""

    def __init__(self, directory: str, dtype: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
        self._cache = transformers.DynamicCache

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        with self._torch.inference_mode():
            cache = self._cache(config=self._model.config)
            chosen = self._step(self._torch.tensor(prompts), cache)
            start = time.perf_counter()
            for _ in range(tokens - 1):
                chosen = self._step(chosen, cache)
            return len(prompts) * (tokens - 1) / (time.perf_counter() - start)

    def prefill(self, prompt: list[int]) -> float:
        with self._torch.inference_mode():
            start = time.perf_counter()
            self._step(self._torch.tensor([prompt]), self._cache(config=self._model.config)).tolist()
            return len(prompt) / (time.perf_counter() - start)

    def logits(self, tokens: Sequence[int]) -> Any:
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([list(tokens)])).logits[0].float()

    def _step(self, tokens: Any, cache: Any) -> Any:
        logits = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)


def serve(engine: Any) -> None:
    """Answer commands until standard input ends."""
    for line in sys.stdin:
        command = json.loads(line)
        result: Any
        if command["do"] == "decode":
            source = random.Random(command["seed"])
            result = engine.decode(
                [_prompt(source, PROMPT_TOKENS) for _ in range(command["streams"])], command["tokens"]
            )
        elif command["do"] == "prefill":
            result = engine.prefill(_prompt(random.Random(command["seed"]), command["tokens"]))
        elif command["do"] == "answers":
            result = engine.answers()
        elif command["do"] == "logits":
            import torch

            torch.save(engine.logits(command["tokens"])[-command["positions"] :].clone(), command["file"])
            result = command["file"]
        else:
            raise ValueError(f"no such command: {command['do']}")
        _say({"result": result})


def _prompt(source: random.Random, tokens: int) -> list[int]:
    return [source.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]


def _say(value: object) -> None:
    _ANSWERS.write(json.dumps(value) + "\n")
    _ANSWERS.flush()


def main() -> int:
    kind, *arguments = sys.argv[1:]
    engine = {"freetoken": Freetoken, "transformers": Transformers}[kind](*arguments)
    _say({"ready": True})
    serve(engine)
    return 0


if __name__ == "__main__":
    # What libraries print goes to standard error; standard output carries answers alone.
    _ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main())
