"""The GGUF header reader; oracles: the `gguf` package as writer and reader, and damage done on purpose."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.vocab.errors import CheckpointError
from freetoken.weights.gguf import TYPE_NAMES, GGUFFile, Strings


def everything(writer: gguf.GGUFWriter) -> None:
    """One metadata value of every type."""
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -3)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -300)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -70000)
    writer.add_uint64("t.u64", 2**63)
    writer.add_int64("t.i64", -(2**40))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 1e-300)
    writer.add_bool("t.bool", True)
    writer.add_string("t.text", "größe")
    writer.add_array("t.words", ["<|im_start|>", "", "é"])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.bools", [True, False])
    writer.add_array("t.floats", [0.25, -1.0])


@pytest.fixture
def small(write_gguf: Callable[..., Path]) -> Path:
    numbers = np.arange(96, dtype=np.float32).reshape(3, 32)
    return write_gguf(
        {"plain": numbers, "half": numbers.astype(np.float16)[0], "packed": (numbers, gguf.GGMLQuantizationType.Q8_0)},
        everything,
    )


def test_metadata_of_every_type_read_back_as_written(small: Path) -> None:
    """Oracle: what the writer was given."""
    metadata = GGUFFile(small).metadata
    plain = {k: v for k, v in metadata.items() if k.startswith("t.") and isinstance(v, int | float | str)}
    assert plain == {
        "t.u8": 200, "t.i8": -3, "t.u16": 60000, "t.i16": -300, "t.u32": 4_000_000_000, "t.i32": -70000,
        "t.u64": 2**63, "t.i64": -(2**40), "t.f32": 0.5, "t.f64": 1e-300, "t.bool": True, "t.text": "größe",
    }  # fmt: skip
    assert {k: list(metadata[k]) for k in ("t.words", "t.ints", "t.bools", "t.floats")} == {
        "t.words": ["<|im_start|>", "", "é"], "t.ints": [1, -2, 3], "t.bools": [True, False], "t.floats": [0.25, -1.0],
    }  # fmt: skip
    assert metadata["t.bool"] is True
    assert metadata["general.architecture"] == "llama"


def test_tensor_infos_equal_the_gguf_packages_reader(small: Path) -> None:
    """Oracle: `gguf.GGUFReader`."""
    ours = GGUFFile(small).tensors
    theirs = gguf.GGUFReader(small).tensors
    assert [(t.name, t.type, t.offset) for t in ours.values()] == [
        (t.name, int(t.tensor_type), t.data_offset) for t in theirs
    ]
    assert ours["packed"].shape == ours["plain"].shape == (3, 32)
    assert ours["half"].shape == (32,)


def test_a_list_of_strings_behaves_like_a_list() -> None:
    words = ["one", "", "zwölf"]
    raw = b"".join(struct.pack("<Q", len(w.encode())) + w.encode() for w in words)
    strings = Strings(raw, 3, "words")
    assert len(strings) == 3
    assert list(strings) == words
    assert strings[-1] == "zwölf"
    assert strings[:2] == words[:2]
    with pytest.raises(CheckpointError, match=r"(?s)read words.*not UTF-8"):
        list(Strings(raw.replace(b"one", b"o\xffe"), 3, "words"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: b"GGML" + raw[4:], "starts with"),
        (lambda raw: b"PK\x03\x04", "starts with"),
        (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "version 1"),
        (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "big-endian"),
        (lambda raw: raw[:3], "truncated"),
        (lambda raw: raw[:40], "truncated"),
        (lambda raw: raw[:8] + struct.pack("<Q", 2**60) + raw[16:], "truncated|corrupt"),
        (lambda raw: raw.replace(b"t.f64", b"t.f32"), "appears twice"),
        (lambda raw: raw.replace(b"t.i64", b"\xff.i64"), "not UTF-8"),
    ],
)
def test_damage_is_named_with_the_file(small: Path, damage: Callable[[bytes], bytes], says: str) -> None:
    small.write_bytes(damage(small.read_bytes()))
    with pytest.raises(CheckpointError, match=says) as caught:
        GGUFFile(small)
    assert str(small) in str(caught.value)


def test_an_empty_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="empty"):
        GGUFFile(tmp_path / "empty.gguf")
    with pytest.raises(CheckpointError, match="No such file"):
        GGUFFile(tmp_path / "none.gguf")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_never_escapes_as_another_error(small: Path, data: st.DataObject) -> None:
    """Property: a cut or overwritten header opens, or raises `CheckpointError`; nothing else."""
    raw = bytearray(small.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=6)):
        raw[at] = data.draw(st.integers(0, 255))
    path = small.with_name("damaged.gguf")
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))])
    try:
        opened = GGUFFile(path)
    except CheckpointError as error:
        found = str(error)
    else:
        found = str(opened.path)
    assert str(path) in found


def test_type_names_equal_the_gguf_packages() -> None:
    """Oracle: the package's enum, for every number both know."""
    theirs = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    shared = TYPE_NAMES.keys() & theirs.keys()
    assert len(shared) >= 30
    assert {n: TYPE_NAMES[n] for n in shared} == {n: theirs[n] for n in shared}


@pytest.mark.model
def test_the_demo_models_header_equals_the_gguf_packages(demo_model: Path, demo_reader: gguf.GGUFReader) -> None:
    """Oracle: `gguf.GGUFReader` on SmolLM2's file, every field and tensor."""
    ours, theirs = GGUFFile(demo_model), demo_reader
    assert {t.name: (t.type, t.offset, t.shape) for t in ours.tensors.values()} == {
        t.name: (int(t.tensor_type), t.data_offset, tuple(int(d) for d in reversed(t.shape))) for t in theirs.tensors
    }
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, value in fields.items():
        mine = ours.metadata[key]
        assert (list(mine) if isinstance(value, list) else mine) == value, key
