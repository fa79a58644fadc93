"""Reading safetensors headers; oracles: the `safetensors` package as writer and reader, and damage done on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from freetoken.vocab.errors import CheckpointError
from freetoken.weights.safetensors_files import safetensors_parts

WriteFolder = Callable[..., Path]


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "b.weight": torch.randn(5, 7).to(torch.bfloat16),
        "a.weight": torch.randn(3, 4),
        "c.half": torch.randn(2, 2, 2).half(),
        "ids": torch.arange(9),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


def test_tensors_equal_the_safetensors_packages(write_folder: WriteFolder) -> None:
    """Oracle: `safetensors.torch.load_file`."""
    folder = write_folder(some_tensors())
    want = load_file(folder / "model.safetensors")
    got = {name: part.extent.tensor() for name, part in safetensors_parts(folder).items()}
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


def test_a_misaligned_file_reads_the_same(tmp_path: Path) -> None:
    """Oracle: the tensor written by hand after a header of odd length."""
    data = torch.randn(6)
    header = b'{"x":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}'
    header += b" " * (1 - len(header) % 2)
    raw = len(header).to_bytes(8, "little") + header + data.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(raw)
    assert (8 + len(header)) % 4
    assert torch.equal(safetensors_parts(tmp_path)["x"].extent.tensor(), data)


def test_shards_come_together_and_in_file_order(write_folder: WriteFolder) -> None:
    folder = write_folder({"z": torch.ones(2), "y": torch.zeros(3)}, {"x": torch.full((4,), 2.0)})
    parts = safetensors_parts(folder)
    assert {n: p.extent.tensor().tolist() for n, p in parts.items()} == {"z": [1.0] * 2, "y": [0.0] * 3, "x": [2.0] * 4}
    places = [(str(p.extent.file.path), p.extent.start) for p in parts.values()]
    assert places == sorted(places)


def test_a_missing_shard_is_named_with_a_tensor_in_it(write_folder: WriteFolder) -> None:
    folder = write_folder({"z": torch.ones(2)}, {"x": torch.ones(4)})
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)tensor x .*model-00002-of-00002\.safetensors.*missing"):
        safetensors_parts(folder)


def test_an_indexed_tensor_the_shard_lacks_is_named(write_folder: WriteFolder) -> None:
    folder = write_folder({"z": torch.ones(2)}, {"x": torch.ones(4)})
    save_file({"other": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)tensor x .*model-00002-of-00002\.safetensors.*no such tensor"):
        safetensors_parts(folder)


def test_an_index_that_leaves_the_folder_is_refused(write_folder: WriteFolder) -> None:
    folder = write_folder({"z": torch.ones(2)}, {"x": torch.ones(4)})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"z": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"no file of this folder"):
        safetensors_parts(folder)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="no weight_map"):
        safetensors_parts(folder)


def test_a_truncated_file_names_the_tensor_it_cuts(write_folder: WriteFolder) -> None:
    folder = write_folder({"first": torch.ones(8), "second": torch.ones(8)})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"(?s)tensor second .*model\.safetensors.*truncated"):
        safetensors_parts(folder)


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"(?s)pickle checkpoint \(pytorch_model\.bin\).*convert to safetensors"):
        safetensors_parts(tmp_path)


def test_nothing_and_files_without_an_index_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        safetensors_parts(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    assert list(safetensors_parts(tmp_path)) == ["a"]
    save_file({"b": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files and no model"):
        safetensors_parts(tmp_path)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}, "Q9"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "make no tensor"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}, "needs 4 bytes"),
        ({"dtype": "F32", "shape": [1]}, "make no tensor"),
        ([], "no object"),
    ],
)
def test_an_impossible_header_entry_is_named(tmp_path: Path, entry: object, says: str) -> None:
    header = json.dumps({"bad": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match=rf"(?s)tensor bad .*{says}"):
        safetensors_parts(tmp_path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_never_escapes_as_another_error(tmp_path: Path, data: st.DataObject) -> None:
    """Property: a cut or overwritten file opens, or raises `CheckpointError`; nothing else."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4), "b": torch.zeros(2, 3)}, path)
    raw = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=5)):
        raw[at] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))])
    try:
        opened = [part.extent.tensor() for part in safetensors_parts(tmp_path).values()]
    except CheckpointError as error:
        found = str(error)
    else:
        found = f"{len(opened)} tensors of model.safetensors"
    assert "model.safetensors" in found
