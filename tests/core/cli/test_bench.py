"""`freetoken bench serve`. Oracle: the fake engine behind a real server, and the messages promised for bad input."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from freetoken.cli.bench import show
from freetoken.cli.main import main
from freetoken.serve.bench.figures import Spread
from freetoken.serve.bench.results import BenchResult, LengthResult, LoadResult

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
from serve_bench import serve

QUICK = ("--lengths", "60,90", "--repeats", "1", "--decode", "5", "--concurrency", "2", "--prompt-tokens", "70")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as running:
        yield running.base


def test_json_on_standard_output(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", url, *QUICK, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [item["prompt_tokens"] for item in result["lengths"]] == [60, 90]
    assert result["decode"]["completion_tokens"] == 5
    assert result["load"][0]["streams"] == 2
    assert set(result["load"][0]["inter_token_ms"]) == {"count", "p50", "p90", "p99", "max", "max_over_median"}


def test_tables(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", url, *QUICK]) == 0
    out = capsys.readouterr().out
    assert "fake/model" in out
    assert "first ÷ again" in out
    assert "1 stream" in out
    assert "under load" in out


def test_a_plot_is_written(url: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "serve", url, *QUICK, "--json", "--plot", str(tmp_path / "x.svg")]) == 0
    assert "<svg" in (tmp_path / "x.svg").read_text(encoding="utf-8")


def test_a_plot_without_matplotlib_names_the_package(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("freetoken.serve.bench.plot.find_spec", lambda _: None)
    assert main(["bench", "serve", url, "--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://127.0.0.1:1"], "nothing answers there"),
        (["ftp://x"], "no address"),
        (["http://127.0.0.1:1", "--lengths", "0", "--decode", "0"], "nothing answers there"),
    ],
)
def test_bad_input_is_explained(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lengths", "x"],
        ["--lengths", "0,5"],
        ["--decode", "-1"],
        ["--repeats", "0"],
        ["--extra", "[]"],
        ["--extra", "{"],
    ],
)
def test_bad_arguments_are_refused_by_the_parser(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", "http://127.0.0.1:1", *arguments])
    assert left.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_nothing_to_measure_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", url, "--lengths", "0", "--decode", "0"]) == 2
    assert "nothing is left to measure" in capsys.readouterr().err


def test_refusals_and_cache_hits_are_shown() -> None:
    spread = Spread.of([0.1, 0.2])
    load = LoadResult(4, 8, 3, 100, 50, 2.0, spread, None, spread, "HTTP 429: the queue is full")
    result = BenchResult("http://x", "m", (LengthResult(5, 5, 0.2, (0.1,)),), None, (load,), 7)
    out = io.StringIO()
    show(result, Console(file=out, width=150))
    assert "3 of 8 requests at 4 streams failed: HTTP 429: the queue is full" in out.getvalue()
    assert "up to 7 tokens" in out.getvalue()


def test_help_is_light() -> None:
    """Property: the command line is built without the libraries that only a run needs."""
    code = "import sys, freetoken.cli.bench_arguments; print('rich' in sys.modules, 'asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
