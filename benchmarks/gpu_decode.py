"""Decode on a GPU: dependent launches against plain ones, for speed and for races, and the kernels' other tables.

    python3 benchmarks/gpu_decode.py [--json PATH] [--logs DIR] [--layers 8] [--only 30|36] [--parts on,off,variants]

Both models with 8 layers and made-up weights, which are the same in every process. Parts, in this order:

- ``on``, ``off``: an engine with dependent launches and one without. Each answers the same prompts greedily, by 256
  tokens, one by one and all together, several times over, replayed and eagerly; replays one step 300 times and
  compares the logits bit for bit; compares replayed with eager steps of every captured size; and says tokens a second,
  kernels a layer, microseconds each, and the gaps. The parent compares the tokens of both engines.
- ``variants``: the other tables of the pair kernels and of one row's products, each in a captured graph, with dependent
  launches and without (``gpu_kernels.py --variants``).

Every part is a process of its own; one that fails does not stop the others. Exit code 1 when anything differed or
failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

KINDS = {"30": "qwen3-30b-a3b", "36": "qwen3.6-35b-a3b"}
PARTS = ("on", "off", "variants")
MARK = "@@"
VARIABLE = "FREETOKEN_DEPENDENT_LAUNCH"
PROMPT_LENGTHS = (3, 17, 119, 257, 500, 1100, 64, 31)
RELAUNCHES = 300


def emit(kind: str, **fields: Any) -> None:
    """One result for the parent."""
    print(MARK + json.dumps({"kind": kind, **fields}), flush=True)


def attempt(kind: str, do: Callable[[], None]) -> None:
    """``do()``; a failure is a result."""
    try:
        do()
    except Exception as error:
        traceback.print_exc()
        emit(kind, ok=False, error=f"{type(error).__name__}: {error}"[:600])


# ------------------------------------------------------------------------------------------- one engine


def prompts(vocab_size: int) -> list[list[int]]:
    from gpu_checks import random_tokens

    source = random.Random(11)
    return [random_tokens(source, n, vocab_size) for n in PROMPT_LENGTHS]


def digest(answers: Sequence[Sequence[int]]) -> list[str]:
    """A short name for each answer."""
    return [hashlib.sha256(repr(list(a)).encode()).hexdigest()[:12] for a in answers]


def answer(session: Any, texts: list[list[int]], tokens: int) -> list[tuple[int, ...]]:
    from freetoken.vocab.sampling import SamplingParams

    wishes = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    return [done.token_ids for done in session.llm.generate(texts, wishes)]


def alone(session: Any, texts: list[list[int]], tokens: int) -> list[tuple[int, ...]]:
    return [answer(session, [text], tokens)[0] for text in texts]


def check_answers(session: Any, tokens: int, rounds: int) -> None:
    """The same tokens in every round, replayed and eagerly."""
    texts = prompts(session.vocab_size)
    first = alone(session, texts, tokens)
    together = answer(session, texts, tokens)
    bad = []
    for turn in range(1, rounds):
        if alone(session, texts, tokens) != first:
            bad.append(f"alone, round {turn}")
        if answer(session, texts, tokens) != together:
            bad.append(f"together, round {turn}")
    graphs, session.engine._graphs = session.engine._graphs, None
    try:
        few = texts[:3]
        if alone(session, few, tokens) != first[:3]:
            bad.append("eager, alone")
        eager = answer(session, texts, tokens)
    finally:
        session.engine._graphs = graphs
    distinct = len({t for a in first for t in a})
    emit("answers", ok=not bad and distinct > 20, differing=bad, distinct_tokens=distinct, rounds=rounds, tokens=tokens)
    # Eager steps of eight may run beside chunks of prompts, so together they are compared between the engines alone.
    emit("tokens", alone=digest(first), together=digest(together), eager=digest(eager))


def check_relaunches(session: Any, counts: Sequence[int], context: int) -> None:
    """One step launched again and again: attention's models must give the same logits, bit for bit, each time.

    A recurrent state moves on with each launch, so such models are left to ``check_answers``.
    """
    import torch
    from gpu_profile import decode_step

    if session.llm.plan.model.state_slot_bytes:
        emit("relaunches", note="a recurrent state moves on: compared by tokens")
        return
    for count in counts:
        plan = decode_step(session, count, context)
        size = session.graphs.size_for(plan)
        session.engine.launch(plan).read()
        want = session.logits[size][:count].clone()
        differing = torch.zeros((), dtype=torch.int64, device=want.device)
        for _ in range(RELAUNCHES):
            session.engine.launch(plan)
            differing += (session.logits[size][:count] != want).any()
        emit("relaunches", sequences=count, launches=RELAUNCHES, differing=int(differing), ok=int(differing) == 0)


def speed(session: Any, tokens: int) -> None:
    """Tokens a second of one stream through the whole engine: the median of five answers."""
    text = prompts(session.vocab_size)[4]
    answer(session, [text], tokens)
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        answer(session, [text], tokens)
        rates.append(tokens / (time.perf_counter() - start))
    layers = session.llm.plan.model.num_layers
    emit("speed", layers=layers, tokens_per_s=round(sorted(rates)[2], 1), all=[round(r, 1) for r in rates])


def run_engine(given: argparse.Namespace) -> None:
    from gpu_checks import check_graphs
    from gpu_profile import profile_decode
    from gpu_serve import write_model
    from gpu_session import open_session

    directory = given.tmp / f"{given.kind}-{given.layers}"
    write_model(given.kind, directory, given.layers)
    options: dict[str, object] = {
        "device": given.device, "dtype": "bfloat16", "prefix_cache": False, "max_seq_len": 4096,
        "max_running_requests": 16, "max_prefill_tokens": 2048, "load_format": "dummy",
    }  # fmt: skip
    with open_session(directory, **options) as session:
        emit("started", dependent=os.environ.get(VARIABLE, "0") == "1", layers=session.llm.plan.model.num_layers)
        attempt("speed", lambda: speed(session, given.tokens))
        for count, context in ((1, 500), (1, 3000), (16, 500)):
            attempt("profile", lambda c=count, n=context: profile_decode(session, c, n, emit))  # type: ignore[misc]
        attempt("answers", lambda: check_answers(session, given.tokens, given.rounds))
        attempt("relaunches", lambda: check_relaunches(session, (1, 4, 16), 500))
        attempt("graphs", lambda: check_graphs(session, emit, steps=3))


def run_variants() -> None:
    """Times of every table, dependent launches on and off; the parent sees them as they come."""
    import gpu_kernels

    report = gpu_kernels.Report()
    for on in ("1", "0"):
        os.environ[VARIABLE] = on
        gpu_kernels.time_variants(report)
        for timing in report.timings:
            emit("timing", dependent=on == "1", name=timing.name, tokens=timing.tokens, us=round(timing.us, 2),
                 roof_us=round(timing.roof_us, 2))  # fmt: skip
        report.timings.clear()
    for failure in report.failures:
        emit("failed", ok=False, error=failure)


# ------------------------------------------------------------------------------------------- the parent


def run_part(given: argparse.Namespace, part: str, key: str, seconds: float) -> list[dict[str, Any]]:
    """A part's results, printed as they come."""
    name = f"{part}{key}"
    command = [
        sys.executable, "-u", __file__, "--run", "variants" if part == "variants" else "engine", "--kind",
        given.kinds.get(key, ""), "--layers", str(given.layers), "--tokens", str(given.tokens), "--rounds",
        str(given.rounds), "--tmp", str(given.tmp), "--device", given.device,
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", VARIABLE: "0" if part == "off" else "1"}
    found: list[dict[str, Any]] = []
    with (given.logs / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        )
        alarm = _Alarm(process, seconds)
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(MARK):
                log.write(line)
                continue
            result = {"part": name, **json.loads(line.removeprefix(MARK))}
            found.append(result)
            show(result)
        code = process.wait()
        alarm.cancel()
    if code != 0:
        words = (given.logs / f"{name}.log").read_text(errors="replace")[-800:]
        found.append({"part": name, "kind": "failed", "ok": False, "error": f"ended with {code}: {words}"})
        show(found[-1])
    return found


class _Alarm:
    """Ends a process, and what it started, when its time is up."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        import threading

        self._process = process
        self._timer = threading.Timer(max(1.0, seconds), self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def cancel(self) -> None:
        self._timer.cancel()


def show(result: dict[str, Any]) -> None:
    mark = {True: "ok  ", False: "FAIL"}.get(result.get("ok"), "    ")  # type: ignore[arg-type]
    rest = {k: v for k, v in result.items() if k not in ("part", "kind", "ok", "rows")}
    print(f"{mark} {result['part']:10} {result['kind']:10} {json.dumps(rest, ensure_ascii=False)}", flush=True)
    for name, count, us, total, share in result.get("rows", []):
        print(f"       {name:50} {count:7.2f}/step {us:8.2f} us {total:9.1f} us/step {100 * share:5.1f} %", flush=True)


def same_tokens(results: Sequence[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """Both engines' tokens, compared."""
    found = {r["part"]: r for r in results if r["kind"] == "tokens"}
    on, off = found.get(f"on{key}"), found.get(f"off{key}")
    if on is None or off is None:
        return None
    equal = {how: on[how] == off[how] for how in ("alone", "together")}
    return {"part": f"on=off {key}", "kind": "tokens", "ok": all(equal.values()), **equal}


def run_all(given: argparse.Namespace) -> int:
    start, results = time.monotonic(), []
    given.tmp.mkdir(parents=True, exist_ok=True)
    given.logs.mkdir(parents=True, exist_ok=True)
    wanted = [(part, key) for key in given.kinds for part in ("on", "off") if part in given.parts]
    wanted += [("variants", "")] if "variants" in given.parts else []
    for part, key in wanted:
        left = given.deadline - (time.monotonic() - start)
        if left < 15:
            results.append({"part": part + key, "kind": "failed", "ok": False, "error": "no time left (--deadline)"})
            show(results[-1])
            continue
        results += run_part(given, part, key, left)
        compared = same_tokens(results, key) if part == "off" else None
        if compared is not None:
            results.append(compared)
            show(compared)
        if given.json:  # after each part, so that a lost machine leaves what was found
            given.json.write_text(json.dumps({"results": results}, indent=1))
    bad = [f"{r['part']}:{r['kind']}" for r in results if r.get("ok") is False]
    print(f"{len(results)} results, {len(bad)} bad {bad[:12]}, {time.monotonic() - start:.0f} s")
    return int(bool(bad))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: tuple(text.split(",")), default=PARTS)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=350.0, help="seconds for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself on any machine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tmp", type=Path, default=Path("/tmp/freetoken-gpu-decode"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/freetoken-gpu-decode/logs"))
    parser.add_argument("--run", choices=("engine", "variants"), help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if given.run == "engine":
        run_engine(given)
        return 0
    if given.run == "variants":
        run_variants()
        return 0
    given.kinds = {"30": "tiny-qwen3-moe", "36": "tiny-qwen3.6-moe"} if given.tiny else dict(KINDS)
    if given.only:
        given.kinds = {given.only: given.kinds[given.only]}
    return run_all(given)


if __name__ == "__main__":
    sys.exit(main())
