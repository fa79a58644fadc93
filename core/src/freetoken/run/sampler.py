"""The sampler: one token for each row of logits, over a fast route and a full one.

The fast route is the bound ``sample`` op over per-row tensors and may run inside a CUDA graph. The full route first
applies, to a copy of its rows and in this order: the repetition penalty, the presence and frequency penalties, the
logit bias, and the mask that keeps a request from stopping before ``min_tokens``; then the same op draws.
Log-probabilities are those of the model's own logits, before any of this and before the temperature.

A draw depends on its logits, parameters, seed and step only (see ``ops.philox``), never on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from freetoken.run.step_plan import SamplingRow
from freetoken.run.token_counts import TokenCounts
from freetoken.vocab.errors import EngineError, UsageError
from freetoken.vocab.sampling import SamplingParams
from freetoken.vocab.units import ceil_div

_ROW_MULTIPLE = 16  # every column of RowTensors starts at a multiple of 16 bytes


@frozen
class ChosenLogprob:
    """A chosen token's log-probability and the likeliest alternatives, likeliest first; natural logarithm."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen(eq=False)
class PendingLogprobs:
    """Log-probabilities still on the device, for the rows in ``rows``; ``top[i]`` likeliest are wanted of each."""

    rows: tuple[int, ...]
    top: tuple[int, ...]
    own: Tensor  # [n] f32
    ids: Tensor  # [n, most] i64
    values: Tensor  # [n, most] f32


@frozen(eq=False)
class SampleResult:
    """``tokens [R] i64`` on the device; nothing has waited for it yet."""

    tokens: Tensor
    logprobs: PendingLogprobs | None = None

    def read_logprobs(self) -> tuple[ChosenLogprob | None, ...]:
        """One entry a row, ``None`` where the row asked for none. Waits for the device where any row asked."""
        found: list[ChosenLogprob | None] = [None] * len(self.tokens)
        if self.logprobs is None:
            return tuple(found)
        tokens, pending = self.tokens.tolist(), self.logprobs
        columns = (pending.own.tolist(), pending.ids.tolist(), pending.values.tolist())
        for row, top, own, ids, values in zip(pending.rows, pending.top, *columns, strict=True):
            found[row] = ChosenLogprob(tokens[row], own, tuple(zip(ids, values, strict=True))[:top])
        return tuple(found)


class RowTensors:
    """The fast route's per-row parameters at fixed addresses, so that a captured graph can read them.

    ``fill`` before a step or a replay; ``args(n)`` are the op's arguments after the logits for ``n`` rows.
    """

    @torch.inference_mode(False)  # so that both modes may fill it, whichever made it
    def __init__(self, capacity: int, device: str | torch.device) -> None:
        self.capacity = ceil_div(capacity, _ROW_MULTIPLE) * _ROW_MULTIPLE
        self._floats = torch.zeros(3, self.capacity, dtype=torch.float32, device=device)  # temperature, top_p, min_p
        self._floats[1] = 1.0
        self._integers = torch.zeros(2, self.capacity, dtype=torch.int64, device=device)  # seeds, steps
        self._top_k = torch.zeros(self.capacity, dtype=torch.int32, device=device)
        self._filled: list[tuple[SamplingParams, int]] = []

    def fill(self, rows: Sequence[SamplingRow]) -> None:
        """Write ``rows`` to the first places. What did not change since the last call is not written again."""
        count = len(rows)
        wanted = [(row.params, row.seed) for row in rows]
        if wanted != self._filled:
            params = [row.params for row in rows]
            floats = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
            self._floats[:, :count] = torch.tensor(floats, dtype=torch.float32)
            self._top_k[:count] = torch.tensor([p.top_k for p in params], dtype=torch.int32)
            self._integers[0, :count] = torch.tensor([row.seed for row in rows], dtype=torch.int64)
            self._filled = wanted
        self._integers[1, :count] = torch.tensor([row.step for row in rows], dtype=torch.int64)

    def args(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """``(temperature, top_k, top_p, min_p, seeds, steps)``, each ``[count]``."""
        temperature, top_p, min_p = self._floats[:, :count].unbind()
        seeds, steps = self._integers[:, :count].unbind()
        return temperature, self._top_k[:count], top_p, min_p, seeds, steps


@frozen(eq=False)
class _State:
    """What the full route keeps for a request. ``slot`` is ``None`` without penalties."""

    slot: int | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None


class Sampler:
    """``sample_call`` is the bound ``sample`` op."""

    def __init__(self, vocab_size: int, device: str | torch.device, sample_call: Callable[..., Tensor]) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._call = sample_call
        self._rows = RowTensors(_ROW_MULTIPLE, device)
        self._counts = TokenCounts(vocab_size, device)
        self._states: dict[str, _State] = {}

    def add(
        self, request_id: str, params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
    ) -> None:
        """Make a request known before its first row; needed where ``keeps_history(params)``, harmless elsewhere.

        ``output`` are tokens generated already, where a request comes back. Raises ``UsageError`` for a bias on a token
        that the vocabulary does not have, ``EngineError`` for an id that is known.
        """
        if params.route == "fast":
            return
        if request_id in self._states:
            raise EngineError(f"sampling state of request {request_id}", "it was added already")
        state = self._new_state(params)
        if keeps_history(params):
            state = evolve(state, slot=self._counts.open(prompt, output))
        self._states[request_id] = state

    def forget(self, request_id: str) -> None:
        """Drop a request's state; unknown ids are ignored."""
        state = self._states.pop(request_id, None)
        if state is not None and state.slot is not None:
            self._counts.close(state.slot)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampleResult:
        """``logits [R, V] f32``, left as they are, and one row each → the tokens drawn.

        Rows of both routes may be mixed; the tokens of penalised requests are counted here, so a row is drawn once.
        """
        assert logits.shape == (len(rows), self._vocab_size), f"logits {list(logits.shape)} for {len(rows)} rows"
        full = [n for n, row in enumerate(rows) if row.params.route == "full"]
        changed = [n for n in full if changes_logits(rows[n])]
        processed = self._processed(logits, rows, changed) if changed else logits
        if len(rows) > self._rows.capacity:
            self._rows = RowTensors(2 * len(rows), self._device)
        self._rows.fill(rows)
        tokens = self._call(processed, *self._rows.args(len(rows)))
        if not full:
            return SampleResult(tokens)
        counted = [n for n in full if self._state(rows[n]).slot is not None]
        if counted:
            self._counts.record(self._slots(rows, counted), tokens[self._tensor(counted, torch.int64)])
        return SampleResult(tokens, self._logprobs(logits, rows, tokens))

    def _processed(self, logits: Tensor, rows: Sequence[SamplingRow], changed: Sequence[int]) -> Tensor:
        """A copy of ``logits`` with penalties, bias and masks in the rows ``changed``."""
        logits = logits.clone()
        counted = [n for n in changed if self._state(rows[n]).slot is not None]
        if counted:
            where = self._tensor(counted, torch.int64)
            part = logits.index_select(0, where)
            params = [rows[n].params for n in counted]
            self._counts.penalise(
                part,
                self._slots(rows, counted),
                self._column([p.repetition_penalty for p in params]),
                self._column([p.presence_penalty for p in params]),
                self._column([p.frequency_penalty for p in params]),
            )
            logits.index_copy_(0, where, part)
        for n in changed:
            row, state = rows[n], self._state(rows[n])
            if state.bias_ids is not None and state.bias_values is not None:
                logits[n].index_add_(0, state.bias_ids, state.bias_values)
            if row.step < row.params.min_tokens:
                ending = [token for token in row.stop_ids if 0 <= token < self._vocab_size]
                logits[n].index_fill_(0, self._tensor(ending, torch.int64), float("-inf"))
        return logits

    def _logprobs(self, logits: Tensor, rows: Sequence[SamplingRow], tokens: Tensor) -> PendingLogprobs | None:
        """From the model's own ``logits``."""
        asked = {n: row.params.logprobs for n, row in enumerate(rows) if row.params.logprobs is not None}
        if not asked:
            return None
        where = self._tensor(tuple(asked), torch.int64)
        wide = torch.log_softmax(logits.index_select(0, where).float(), dim=-1)
        own = wide.gather(-1, tokens.index_select(0, where).unsqueeze(-1)).squeeze(-1)
        values, ids = torch.topk(wide, min(max(asked.values()), self._vocab_size), dim=-1)
        return PendingLogprobs(tuple(asked), tuple(asked.values()), own, ids, values)

    def _state(self, row: SamplingRow) -> _State:
        state = self._states.get(row.request_id)
        if state is None:
            if keeps_history(row.params):
                raise EngineError(
                    f"penalties of request {row.request_id}",
                    "the sampler was never told of it, or was told to forget it",
                )
            state = self._states[row.request_id] = self._new_state(row.params)
        return state

    def _new_state(self, params: SamplingParams) -> _State:
        if not params.logit_bias:
            return _State()
        unknown = [token for token, _ in params.logit_bias if not 0 <= token < self._vocab_size]
        if unknown:
            raise UsageError(f"logit_bias on token {unknown[0]}", f"the vocabulary has {self._vocab_size} tokens")
        ids, values = zip(*params.logit_bias, strict=True)
        return _State(None, self._tensor(ids, torch.int64), self._tensor(values, torch.float32))

    def _slots(self, rows: Sequence[SamplingRow], which: Sequence[int]) -> Tensor:
        return self._tensor([self._state(rows[n]).slot or 0 for n in which], torch.int64)

    def _column(self, values: Sequence[float]) -> Tensor:
        return self._tensor(values, torch.float32).unsqueeze(-1)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self._device)


def changes_logits(row: SamplingRow) -> bool:
    """Whether the full route changes this row before the draw; one that only asks for log-probabilities does not."""
    return keeps_history(row.params) or bool(row.params.logit_bias) or row.step < row.params.min_tokens


def keeps_history(params: SamplingParams) -> bool:
    """Whether a request's earlier tokens change its logits, so that ``Sampler.add`` must know its prompt."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
