"""Bad input, as a user meets it: what was asked, what is true, what to do; exit code 2, no traceback, nothing lost.

Oracle: the text itself must hold the names and numbers that are at fault, and the server must answer the next request.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file

from freetoken.models import llama, mixtral
from freetoken.testing.checkpoints import write_tiny
from freetoken.weights.locate import InstalledModel

Damage = Callable[[Path], None]
FIRST = "model.embed_tokens.weight"


@frozen
class Ended:
    """A command that has ended."""

    code: int
    text: str

    def assert_refused(self, *parts: str) -> None:
        """Exit code 2, the three parts, every one of ``parts``, and no Python showing."""
        assert self.code == 2, self.text
        assert re.search(r"^freetoken: .+\n  found: .+", self.text, re.M), self.text
        assert "\n  fix:   " in self.text, self.text
        assert "Traceback" not in self.text, self.text
        for part in parts:
            assert part in self.text, f"{part!r} is not in:\n{self.text}"


def freetoken(*arguments: str, cwd: Path, **env: str) -> Ended:
    """Run the program in ``cwd``; ``CUDA_VISIBLE_DEVICES`` hides what this machine may have."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FREETOKEN_")}
    done = subprocess.run(
        [sys.executable, "-m", "freetoken", *arguments], capture_output=True, text=True, check=False, cwd=cwd,
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **env}, timeout=120,
    )  # fmt: skip
    return Ended(done.returncode, done.stderr)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(llama.FAMILY, tmp_path / "tiny")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ended]:
    """The same in this process, in an empty folder: quick, for what is refused before an engine is started."""
    from freetoken.cli.main import main

    for name in list(os.environ):
        if name.startswith("FREETOKEN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elsewhere = tmp_path / "cwd"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    def call(*arguments: object) -> Ended:
        code = main([str(a) for a in arguments])
        return Ended(code, capsys.readouterr().err)

    return call


# ------------------------------------------------------------------------------------------- checkpoints


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def damage_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[8:20] = b"\xff" * 12
    path.write_bytes(raw)


def wrong_sizes(folder: Path) -> None:
    """The header says a tensor is larger than its bytes."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header[FIRST]["shape"] = [9999, 128]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def missing_shard(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


CHECKPOINTS: Mapping[str, tuple[Damage, tuple[str, ...]]] = {
    "no-weights": (lambda p: (p / "model.safetensors").unlink(), ("tiny", "no model.safetensors")),
    "no-config": (lambda p: (p / "config.json").unlink(), ("no config.json",)),
    "config-is-no-json": (lambda p: (p / "config.json").write_text("{"), ("config.json", "not JSON")) ,
    "config-is-no-utf8": (lambda p: (p / "config.json").write_bytes(b'{"a": "\xff"}'), ("config.json", "not UTF-8")),
    "missing-shard": (missing_shard, (".weight", "model-00001-of-00001.safetensors", "missing")),
    "missing-tensor": (lambda p: edit_weights(p, lambda t: t.pop("model.norm.weight")), ("model.norm.weight", "tiny")),
    "truncated": (cut, (".weight of ", "model.safetensors", "truncated: it ends at byte")) ,
    "truncated-header": (cut_header, ("model.safetensors", "truncated")),
    "corrupt-header": (damage_header, ("model.safetensors", "header")),
    "corrupt-sizes": (wrong_sizes, (FIRST, "model.safetensors", "9999")),
    "pickle": (pickled, ("pickle", "pytorch_model.bin", "safetensors")),
    "activation": (lambda p: edit_config(p, hidden_act="gelu_new"), ("hidden_act = 'gelu_new'", "silu")),
    "rope-scaling": (
        lambda p: edit_config(p, rope_scaling={"rope_type": "yarn", "factor": 4.0}), ("yarn", "rope")
    ),
    "architecture": (
        lambda p: edit_config(p, architectures=["NewForCausalLM"]), ("NewForCausalLM", "LlamaForCausalLM")
    ),
    "quantisation": (
        lambda p: edit_config(p, quantization_config={"quant_method": "awq", "bits": 4}), ("awq", "4 bits")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_bad_checkpoint_names_what_is_wrong_and_is_left_as_it_is(
    case: str, tiny: Path, run: Callable[..., Ended]
) -> None:
    damage, parts = CHECKPOINTS[case]
    damage(tiny)
    before = {p.name: p.read_bytes() for p in tiny.iterdir()}
    run("explain", tiny, "--device", "cpu").assert_refused(*parts)
    run("generate", tiny, "Hello", "--device", "cpu").assert_refused(*parts)
    assert {p.name: p.read_bytes() for p in tiny.iterdir()} == before


@pytest.mark.parametrize("case", ["truncated", "missing-tensor", "pickle", "activation"])
def test_the_server_ends_with_the_same_words(case: str, tiny: Path, tmp_path: Path) -> None:
    damage, parts = CHECKPOINTS[case]
    damage(tiny)
    freetoken("serve", "--model", str(tiny), "--port", "0", cwd=tmp_path).assert_refused(*parts)


SHAPES: Mapping[str, tuple[Damage, tuple[str, ...]]] = {
    "shape": (
        lambda p: edit_weights(p, lambda t: t.update({"model.norm.weight": torch.ones(64)})),
        ("model.norm.weight", "model.safetensors", "[64]", "[128]"),
    ),
    "integers": (
        lambda p: edit_weights(p, lambda t: t.update({"model.norm.weight": torch.ones(128, dtype=torch.int32)})),
        ("model.norm.weight", "model.safetensors", "int32"),
    ),
    "nobody-wants-it": (
        lambda p: edit_weights(p, lambda t: t.update({"model.extra.weight": torch.ones(2)})),
        ("model.extra.weight", "model.safetensors"),
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_tensors_that_do_not_make_the_model(case: str, tiny: Path, run: Callable[..., Ended]) -> None:
    damage, parts = SHAPES[case]
    damage(tiny)
    run("explain", tiny, "--device", "cpu").assert_refused(*parts)
    run("generate", tiny, "Hello", "--device", "cpu").assert_refused(*parts)


@pytest.mark.model
def test_a_truncated_gguf_names_tensor_and_file(smollm2_path: Path, tmp_path: Path, run: Callable[..., Ended]) -> None:
    path = tmp_path / "half.gguf"
    with smollm2_path.open("rb") as whole:
        path.write_bytes(whole.read(8 << 20))
    run("explain", path).assert_refused("half.gguf", "tensor ", "truncated", str(8 << 20))
    path.write_bytes(path.read_bytes()[:1000])
    run("explain", path).assert_refused("half.gguf", "truncated header")
    path.write_bytes(b"GGML" + bytes(100))
    run("explain", path).assert_refused("half.gguf", "GGML")
    path.write_bytes(b"")
    run("explain", path).assert_refused("half.gguf", "empty")


def test_a_broken_chat_template_is_found_before_the_engine_starts(tiny: Path, tmp_path: Path) -> None:
    (tiny / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")
    freetoken("serve", "--model", str(tiny), "--port", "0", cwd=tmp_path).assert_refused("chat template", "line 1")


# ------------------------------------------------------------------------------------------- models and memory


def test_an_unknown_model_lists_the_ways_to_name_one(run: Callable[..., Ended]) -> None:
    for command in (("explain", "nosuchmodel"), ("serve", "--model", "nosuchmodel", "--port", "0")):
        run(*command).assert_refused("nosuchmodel", "a .gguf file", "a directory")


def test_a_hub_id_without_a_network_says_so(run: Callable[..., Ended], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    run("explain", "nobody/nothing-of-that-name").assert_refused("nobody/nothing-of-that-name", "cannot be reached")


def test_several_installed_models_and_none_named(run: Callable[..., Ended], monkeypatch: Any) -> None:
    two = tuple(InstalledModel(n, f"llm-{n}", "1", Path("x.gguf")) for n in ("one", "two"))
    monkeypatch.setattr("freetoken.weights.locate.installed_models", lambda: two)
    run("serve", "--port", "0").assert_refused("2 model packages are installed", "one, two")


def test_a_model_too_big_for_the_memory_is_refused_with_the_numbers_before_loading(
    tiny: Path, run: Callable[..., Ended], tmp_path: Path
) -> None:
    """The tiny model's weights are no trouble, the interpreter's share is: 300 MiB of 100."""
    cap = ("--device", "cpu", "--device-memory-bytes", "100MiB")
    parts = ("tiny on this machine", "runtime 300.0 MiB", "allowed are 100.0 MiB", "--memory-ratio")
    run("explain", tiny, *cap).assert_refused(*parts)
    run("generate", tiny, "Hello", *cap).assert_refused(*parts)
    freetoken("serve", "--model", str(tiny), "--port", "0", *cap, cwd=tmp_path).assert_refused(*parts)


def test_a_machine_without_free_memory(tiny: Path, run: Callable[..., Ended]) -> None:
    few = ("--device", "cpu", "--host-memory-bytes", "1MiB")
    run("explain", tiny, *few).assert_refused("allowed are 0 B (--memory-ratio 0.9 of 0 B free)")


def test_experts_that_do_not_fit(tmp_path: Path, run: Callable[..., Ended]) -> None:
    big = {**mixtral.tiny(), "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").write_text(json.dumps(big))
    ended = run(
        "explain", tmp_path / "big", "--load-format", "dummy", "--device", "cpu", "--host-memory-bytes", "64GiB",
        "--moe-strategy", "resident",
    )  # fmt: skip
    ended.assert_refused("--moe-strategy resident", "its experts need 168.0 GiB", "pip install freetoken-moe-offload")


def test_more_kv_than_memory(tiny: Path, run: Callable[..., Ended]) -> None:
    run("explain", tiny, "--device", "cpu", "--kv-tokens", "1000000000000").assert_refused(
        "--kv-tokens 1000000000000", "GiB", "are left"
    )


def test_more_context_than_the_model_has(tiny: Path, run: Callable[..., Ended], tmp_path: Path) -> None:
    run("explain", tiny, "--max-seq-len", "513").assert_refused("--max-seq-len 513", "512 tokens", "at most 512")
    ended = freetoken("serve", "--model", str(tiny), "--port", "0", "--max-seq-len", "513", cwd=tmp_path)
    ended.assert_refused("--max-seq-len 513", "512 tokens")


# ------------------------------------------------------------------------------------------- options

OPTIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kernel-form": (("--kernel", "rope"), ("--kernel rope", "OP=NAME")),
    "kernel-op": (("--kernel", "ropes=torch"), ("--kernel ropes=torch", "rope")),
    "kernel-name": (("--kernel", "rope_write=fastest"), ("--kernel rope_write=fastest", "rope_write=torch")),
    "cuda": (("--device", "cuda"), ("--device cuda",)),
    "backend": (("--attention-backend", "fastest"), ("--attention-backend fastest", "torch")),
    "flashinfer": (("--attention-backend", "flashinfer"), ("--attention-backend flashinfer", "cuda")),
    "strategy": (("--moe-strategy", "magic"), ("--moe-strategy magic", "resident")),
    "policy": (("--warmup-policy", "magic"), ("--warmup-policy magic", "none")),
    "number": (("--max-seq-len", "many"), ("--max-seq-len = 'many'",)),
    "fraction": (("--max-seq-len", "12.5"), ("--max-seq-len = '12.5'",)),
    "too-low": (("--max-seq-len", "1"), ("--max-seq-len = 1", "at least 2")),
    "negative": (("--max-running-requests", "-4"), ("--max-running-requests = -4", "at least 1")),
    "too-high": (("--memory-ratio", "1.5"), ("--memory-ratio = 1.5", "at most 1")),
    "size": (("--host-memory-bytes", "12 apples"), ("--host-memory-bytes = '12 apples'", "KiB")),
    "choice": (("--dtype", "int8"), ("--dtype = 'int8'", "bfloat16")),
    "flag": (("--max-seq-length", "100"), ("--max-seq-length", "--max-seq-len")),
    "plugin": (("--plugin", "nothing"), ("--plugin nothing",)),
    "config": (("--config", "absent.toml"), ("--config absent.toml", "no such file")),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_a_wrong_option(case: str, tiny: Path, run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words, parts = OPTIONS[case]
    run("explain", tiny, *words).assert_refused(*parts)


FILES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "syntax": ("port = = 1", ("freetoken.toml", "line 1")),
    "key": ("prot = 1", ("prot in freetoken.toml", "did you mean port?")),
    "section": ("[nothing]\nx = 1", ("nothing.x in freetoken.toml", "no such section", "sections are")),
    "type": ('port = "many"', ("freetoken.toml: port = 'many'", "--port takes int")),
    "range": ("port = 70000", ("freetoken.toml: port = 70000", "at most 65535")),
    "plugins-key": ("[plugins]\nnames = ['x']", ("[plugins] names", "require and block")),
    "plugins-type": ("[plugins]\nblock = 'x'", ("[plugins] block = 'x'", "list")),
    "plugins-no-section": ("plugins = 3", ("plugins = 3", "[plugins]")),
    "blocked": (
        "[plugins]\nblock = ['warmup-ladder']\n[warmup-ladder]\nskip = true", ("warmup-ladder.skip", "blocked")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_file(case: str, tiny: Path, run: Callable[..., Ended]) -> None:
    text, parts = FILES[case]
    Path("freetoken.toml").write_text(text)
    run("explain", tiny).assert_refused(*parts)


def test_a_file_that_is_no_text(tiny: Path, run: Callable[..., Ended]) -> None:
    Path("freetoken.toml").write_bytes(b"port = 1 # \xff")
    run("explain", tiny).assert_refused("freetoken.toml", "cannot be read")


def test_a_wrong_variable_is_refused_and_an_unknown_one_warned_about(
    tiny: Path, run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREETOKEN_MAX_SEQ_LENGTH", "100")
    warned = run("explain", tiny)
    assert warned.code == 0
    assert "FREETOKEN_MAX_SEQ_LENGTH" in warned.text
    assert "did you mean FREETOKEN_MAX_SEQ_LEN?" in warned.text
    monkeypatch.setenv("FREETOKEN_MAX_SEQ_LEN", "many")
    run("explain", tiny).assert_refused("FREETOKEN_MAX_SEQ_LEN = 'many'")


def test_the_monolith_in_the_same_environment_is_refused(tmp_path: Path) -> None:
    info = tmp_path / "site" / "freetoken-0.1.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: freetoken\nVersion: 0.1.3\n")
    ended = freetoken("plugins", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    ended.assert_refused("freetoken 0.1.3", "pip uninstall freetoken")


# ------------------------------------------------------------------------------------------- requests

RAISES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages, please') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tiny(llama.FAMILY, tmp_path_factory.mktemp("models") / "tiny")
    (folder / "chat_template.jinja").write_text(RAISES)
    return serve("--model", str(folder), "--device", "cpu", "--max-seq-len", "64", "--max-body-bytes", "20000")


def post(url: str, body: bytes | dict[str, Any]) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", data=data, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def said(text: str, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": role, "content": text}], "max_tokens": 2, **fields}


REQUESTS: Mapping[str, tuple[bytes | dict[str, Any], int, tuple[str, ...]]] = {
    "no-json": (b"{", 400, ("JSON",)),
    "no-utf8": (
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        400,
        ("JSON", "column 61"),
    ),
    "half-a-character": (json.dumps(said("\ud800")).encode(), 400, ("JSON", "column 67")),
    "no-object": (b"[]", 400, ("object",)),
    "too-large": (b" " * 20001, 413, ("larger", "19.5 KiB")),
    "no-messages": ({"model": "tiny"}, 400, ("messages",)),
    "empty-messages": ({"model": "tiny", "messages": []}, 400, ("messages", "empty")),
    "wrong-type": (said("hi", temperature="warm"), 400, ("temperature",)),
    "negative": (said("hi") | {"max_tokens": -1}, 400, ("max_tokens", "-1")),
    "absurd": (said("hi") | {"max_tokens": 10**9}, 400, ("max_tokens", "64")),
    "too-long": (said("a" * 100), 400, ("100", "64")),
    "unknown-field": (said("hi", tempreture=0), 400, ("tempreture",)),
    "unknown-model": (said("hi") | {"model": "gpt-4"}, 404, ("gpt-4", "tiny")),
    "template-raises": (said("Be good.", role="system"), 400, ("no system messages, please",)),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_bad_request_is_answered_and_the_next_one_too(case: str, server: Any) -> None:
    body, status, parts = REQUESTS[case]
    code, answer = post(server.url, body)
    assert code == status, answer
    assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")
    for part in parts:
        assert part in answer["error"]["message"], answer
    code, good = post(server.url, said("hi"))
    assert (code, good["usage"]["completion_tokens"]) == (200, 2)
    assert "Traceback" not in server.text()
