"""``freetoken.LLM``: the engine in this process, for scripts and tests. One thread, no server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from attrs import field, frozen

from freetoken.builtin import BUILTINS
from freetoken.config.engine_options import CoreOptions
from freetoken.config.facts import find_family
from freetoken.config.sources import OptionTable, Settings, merge
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.options import CORE_OWNER
from freetoken.plugin.selection import Selection
from freetoken.schedule.engine_core import Output
from freetoken.serve.engine_start import Report, start_engine
from freetoken.serve.prepare import prepare
from freetoken.serve.start import EngineStart, check_names, checkpoint_facts, open_model
from freetoken.serve.text import IncrementalDetokenizer, StopStrings
from freetoken.serve.text_side import text_side
from freetoken.vocab.errors import EngineError, OptionError
from freetoken.vocab.sampling import SamplingParams
from freetoken.weights.locate import locate

Prompt = str | Sequence[int]


@frozen(eq=False)
class Completion:
    """One answer: its text and token ids (a stop token included), and why it ended."""

    text: str
    token_ids: tuple[int, ...]
    finish: str
    prompt_token_ids: tuple[int, ...]
    cached_tokens: int = 0
    logprobs: tuple[object, ...] = field(default=())


class LLM:
    """Loads a model and answers prompts.

    ``options`` are the fields of the core's options (``dtype="float32"``, ``max_seq_len=2048``) and, under
    ``plugin_options``, ``{"warmup-ladder": {"workers": 2}}`` those of plugins. Raises ``UsageError`` or
    ``CheckpointError`` as the command line does.

    >>> with LLM("smollm2") as llm:                                                # doctest: +SKIP
    ...     print(llm.chat([{"role": "user", "content": "Hello"}]).text)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        plugins: Sequence[str] = (),
        plugin_options: Mapping[str, Mapping[str, object]] | None = None,
        report: Report = lambda _phase, _fraction, _detail: None,
        **options: object,
    ) -> None:
        loaded = build_plugins(Selection.of(plugins), BUILTINS)
        table = OptionTable.of(loaded.catalogs.options)
        file: dict[str, object] = dict(plugin_options or {})
        settings = merge(table, flags=(), environment={}, file=file, file_name="plugin_options", records=loaded.records)
        settings = _with_options(settings, {"model": model, **options})
        core = settings.core(CoreOptions)
        check_names(core, loaded.catalogs)
        found = locate(core.model)
        start = EngineStart(loaded.selection, settings, found.path, found.short_name)
        with open_model(start, loaded) as checkpoint:
            family = find_family(loaded.catalogs.model_families, checkpoint_facts(checkpoint, found.short_name))
            self._text = text_side(checkpoint, family)
        self._running = start_engine(start, report, prepare(start, loaded))
        self._ids = itertools.count()
        self._answers: dict[str, _Answer] = {}

    @property
    def plan(self) -> Any:
        """The plan the engine was built from."""
        return self._running.plan

    @property
    def running(self) -> Any:
        """The engine's core and caches, for tests and benchmarks."""
        return self._running

    @property
    def tokenizer(self) -> Any:
        return self._text.tokenizer

    def default_params(self) -> SamplingParams:
        """The checkpoint's own sampling wishes."""
        return SamplingParams(**self._text.defaults.sampling())  # type: ignore[arg-type]

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer prompts (text, or token ids) together; ``params`` may be one for all or one for each."""
        many = _as_prompts(prompts)
        chosen = params if params is not None else self.default_params()
        each = [chosen] * len(many) if isinstance(chosen, SamplingParams) else list(chosen)
        if len(each) != len(many):
            raise OptionError(f"{len(each)} sampling parameters", f"there are {len(many)} prompts")
        return self._run([self._encoded(p) for p in many], each)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **template: Any
    ) -> Completion:
        """Answer one conversation through the chat template; ``template`` are further variables of it."""
        return self._run([self._rendered(messages, **template)], [params or self.default_params()])[0]

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **template: Any
    ) -> Iterator[str]:
        """The same answer in pieces of text as they come."""
        yield from self._stream(self._rendered(messages, **template), params or self.default_params())

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt in pieces of text."""
        yield from self._stream(self._encoded(prompt), params or self.default_params())

    def _encoded(self, prompt: Prompt) -> list[int]:
        return self._text.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        return self._text.tokenizer.encode(self._text.template.render(messages, **template), add_special=False)

    def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        answers: list[_Answer] = []
        try:
            for prompt, wishes in zip(prompts, params, strict=True):
                answers.append(self._submit(prompt, wishes))
            while not all(answer.finish for answer in answers):
                self._step()
        finally:
            self._drop(answers)
        return [answer.completion(prompt) for answer, prompt in zip(answers, prompts, strict=True)]

    def _stream(self, prompt: list[int], params: SamplingParams) -> Iterator[str]:
        answer = self._submit(prompt, params)
        told = 0
        try:
            while not answer.finish or len(answer.text) > told:  # others' steps may have finished it
                piece = answer.text[told:]
                told = len(answer.text)
                if piece:
                    yield piece
                else:
                    self._step()
        finally:
            self._drop([answer])
        answer.completion(prompt)  # raises what the engine reported

    def _submit(self, prompt: list[int], params: SamplingParams) -> _Answer:
        request_id = f"llm-{next(self._ids)}"
        self._running.core.submit(request_id, prompt, params)
        self._answers[request_id] = answer = _Answer(request_id, self._text.tokenizer, params)
        return answer

    def _step(self) -> None:
        """One step of the engine; every answer that is waited for, here or by an open stream, gets its news."""
        for output in self._running.core.step():
            answer = self._answers.get(output.request_id)
            if answer is not None and answer.take(output):
                self._running.core.abort(output.request_id)

    def _drop(self, answers: Sequence[_Answer]) -> None:
        """Nobody waits for these any more."""
        core = self._running.core
        for answer in answers:
            del self._answers[answer.request_id]
            core.abort(answer.request_id)
        while not self._answers and not core.idle:  # a step in flight
            core.step()

    def close(self) -> None:
        """Tell the plugins that the engine stops. The weights go with the last reference."""
        self._running.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Answer:
    """Collects one request's outputs and turns them into text."""

    def __init__(self, request_id: str, tokenizer: Any, params: SamplingParams) -> None:
        self.request_id = request_id
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopStrings(params.stop)
        self._tokens: list[int] = []
        self._logprobs: list[object] = []
        self._cached = 0
        self._error: EngineError | None = None
        self.text = ""
        self.finish = ""

    def take(self, output: Output) -> bool:
        """Add an output; ``True`` when a stop string was found, so that the request should be dropped."""
        if self.finish:
            return False
        self._tokens += output.tokens
        self._logprobs += output.logprobs
        self._cached = output.cached_tokens
        if output.error is not None:
            refusal = output.error
            self._error = EngineError(refusal.asked, refusal.found, refusal.fix)
        shown = output.tokens[:-1] if output.finish == "stop" else output.tokens
        piece, stopped = self._stops.push(self._detokenizer.push(shown))
        self.text += piece
        if stopped:
            self.finish = "stop"
            return not output.finish
        if output.finish:
            self.finish = output.finish
            last, stopped = self._stops.push(self._detokenizer.flush())
            self.text += last + ("" if stopped else self._stops.flush())
        return False

    def completion(self, prompt: list[int]) -> Completion:
        if self._error is not None:
            raise self._error
        return Completion(
            self.text, tuple(self._tokens), self.finish, tuple(prompt), self._cached, tuple(self._logprobs)
        )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _with_options(settings: Settings, options: Mapping[str, object]) -> Settings:
    known = {name for owner, name in settings.values if owner == CORE_OWNER}
    for name, value in options.items():
        if name not in known:
            raise OptionError(f"LLM({name}=…)", f"no such option; known: {', '.join(sorted(known))}")
        if value is not None:
            settings = settings.with_value(CORE_OWNER, name, value, f"LLM({name}=…)")
    return settings


__all__ = ["LLM", "Completion"]
