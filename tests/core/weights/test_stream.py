"""The weight stream; oracle: the tensors as written, and the slots asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from freetoken.plugin.specs import WeightFormatSpec
from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import Source, StoredTensor, WeightSlot
from freetoken.weights.checkpoint import open_checkpoint
from freetoken.weights.stream import load_weights

Formats = tuple[WeightFormatSpec, ...]
Write = Callable[..., Path]


class Taken:
    """A receiver that keeps copies, as a packer does."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.tensors: dict[str, list[torch.Tensor]] = {}

    def __call__(self, slot: WeightSlot, tensors: Sequence[StoredTensor]) -> None:
        self.order.append(slot.name)
        self.tensors[slot.name] = [t.parts["data"].clone() for t in tensors]


def test_every_slot_arrives_once_complete_and_in_file_order(write_folder: Write, formats: Formats) -> None:
    q, k, norm = torch.randn(8, 6), torch.randn(4, 6), torch.randn(6)
    experts = torch.randn(3, 10, 6)
    down = torch.randn(3, 6, 5)
    embedding = torch.randn(9, 6)
    folder = write_folder({"q": q, "norm": norm}, {"k": k, "e": embedding, "gate_up": experts, "down": down})
    slots = [
        WeightSlot("head", "linear", (Source("e"),), (9, 6)),
        WeightSlot("embed", "embedding", (Source("e"),), (9, 6)),
        *(
            WeightSlot(
                f"expert.{e}", "experts",
                (Source("gate_up", e, (0, 5)), Source("gate_up", e, (5, 10)), Source("down", e)), (6, 5), expert=e,
            )
            for e in range(3)
        ),
        WeightSlot("qk", "linear", (Source("q"), Source("k")), (12, 6)),
        WeightSlot("norm", "vector", (Source("norm"),), (6,), add=1.0),
    ]  # fmt: skip
    taken, told = Taken(), []
    checkpoint = open_checkpoint(folder, formats)
    load_weights(checkpoint, slots, taken, dtype="float32", report=lambda f, detail: told.append((f, detail)))
    assert sorted(taken.order) == sorted(slot.name for slot in slots)
    assert set(taken.order[:2]) == {"qk", "norm"}, "the first file's slots come first"
    want = {"head": [embedding], "embed": [embedding], "qk": [q, k], "norm": [norm]}
    want |= {f"expert.{e}": [experts[e, :5], experts[e, 5:], down[e]] for e in range(3)}
    for name, tensors in want.items():
        assert all(torch.equal(a, b) for a, b in zip(taken.tensors[name], tensors, strict=True)), name
    assert [f for f, _ in told] == sorted(f for f, _ in told)
    assert told[-1][0] == 1.0


def test_released_pages_read_the_same_again(write_folder: Write, formats: Formats) -> None:
    """Two passes over one checkpoint, whose pages the first gave back. Oracle: the tensor as written."""
    weight = torch.randn(300, 1000)
    checkpoint = open_checkpoint(write_folder({"w": weight}), formats)
    slots = [
        WeightSlot(n, "linear", (Source("w", rows=r),), (150, 1000)) for n, r in (("a", (0, 150)), ("b", (150, 300)))
    ]
    for _ in range(2):
        taken = Taken()
        load_weights(checkpoint, slots, taken, dtype="float32")
        assert torch.equal(torch.cat(taken.tensors["a"] + taken.tensors["b"]), weight)


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_take_slots_side_by_side(write_folder: Write, formats: Formats, workers: int) -> None:
    """Oracle: the tensors as written. A barrier shows that ``workers`` deliveries run at once, a counter that no more
    do, and that tensors stay readable to the end of their own delivery."""
    written = {f"w{i}": torch.randn(40, 100) for i in range(2 * workers)}
    checkpoint = open_checkpoint(write_folder(written), formats)
    slots = [WeightSlot(name, "linear", (Source(name),), (40, 100)) for name in written]
    taken, meeting, inside, most = Taken(), threading.Barrier(workers, timeout=20), 0, 0
    lock = threading.Lock()

    def deliver(slot: WeightSlot, tensors: Sequence[StoredTensor]) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        meeting.wait()
        with lock:
            taken(slot, tensors)
            inside -= 1

    told: list[float] = []
    load_weights(checkpoint, slots, deliver, dtype="float32", workers=workers, report=lambda f, _: told.append(f))
    assert most == workers
    assert all(torch.equal(taken.tensors[name][0], weight) for name, weight in written.items())
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_a_workers_error_ends_the_stream(write_folder: Write, formats: Formats) -> None:
    written = {f"w{i}": torch.ones(2, 3) for i in range(9)}
    checkpoint = open_checkpoint(write_folder(written), formats)
    seen: list[str] = []

    def deliver(slot: WeightSlot, _: Sequence[StoredTensor]) -> None:
        seen.append(slot.name)
        raise CheckpointError(f"keep {slot.name}", "it is too large")

    slots = [WeightSlot(name, "linear", (Source(name),), (2, 3)) for name in written]
    with pytest.raises(CheckpointError, match="keep w0"):
        load_weights(checkpoint, slots, deliver, dtype="float32", workers=2)
    assert len(seen) < len(slots)


def test_refusals_come_before_the_first_delivery(write_folder: Write, formats: Formats) -> None:
    folder = write_folder({"a": torch.ones(2, 3), "b": torch.ones(4)})
    checkpoint = open_checkpoint(folder, formats)
    good = WeightSlot("a", "linear", (Source("a"),), (2, 3))
    taken = Taken()
    for slots, says in (
        ([good], "no place for b"),
        ([good, WeightSlot("b", "vector", (Source("b"),), (5,))], r"\[4\]"),
        ([good, WeightSlot("b", "vector", (Source("missing"),), (4,))], r"(?s)load b.*missing.*model\.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=says):
            load_weights(checkpoint, slots, taken, dtype="float32")
    assert not taken.order
    load_weights(checkpoint, [good], taken, dtype="float32", ignored=("^b$",))
    assert taken.order == ["a"]


def test_heads_of_a_gguf_llama_come_back_in_order(
    write_gguf: Write, tiny_llama: Callable[[gguf.GGUFWriter], None], formats: Formats
) -> None:
    """Oracle: the matrix before the converter's permutation; blocks stay packed."""
    heads, dim = 4, 16
    q = np.random.default_rng(1).standard_normal((heads * dim, 64)).astype(np.float32)
    permuted = q.reshape(heads, 2, dim // 2, 64).swapaxes(1, 2).reshape(q.shape)
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = {"blk.0.attn_q.weight": (permuted, kind), "token_embd.weight": np.zeros((2, 64), np.float32)}
    checkpoint = open_checkpoint(write_gguf(stored, tiny_llama), formats)
    name = "model.layers.0.self_attn.q_proj.weight"
    slot = WeightSlot("q", "linear", (Source(name, unpermute_heads=heads),), q.shape)
    taken = Taken()
    load_weights(checkpoint, [slot], taken, dtype="float32", ignored=("embed",))
    assert taken.tensors["q"][0].dtype == torch.uint8
    got = gguf.dequantize(taken.tensors["q"][0].numpy(), kind)
    assert np.array_equal(got, gguf.dequantize(gguf.quantize(q, kind), kind))


def test_a_dummy_checkpoint_streams_made_up_weights(tmp_path: Path, formats: Formats) -> None:
    (tmp_path / "config.json").write_text("{}")
    slots = [WeightSlot(f"w{i}", "linear", (Source("any"),), (4, 5)) for i in range(3)]
    taken, told = Taken(), []
    load_weights(
        open_checkpoint(tmp_path, formats, dummy=True), slots, taken, dtype="bfloat16",
        report=lambda fraction, _: told.append(fraction),
    )  # fmt: skip
    assert taken.order == ["w0", "w1", "w2"]
    assert taken.tensors["w0"][0].dtype == torch.bfloat16
    assert told[-1] == 1.0


@pytest.mark.model
def test_the_demo_model_streams_bit_by_bit_as_the_gguf_package_reads_it(
    formats: Formats, demo_model: Path, demo_reader: gguf.GGUFReader
) -> None:
    """Oracle: `gguf.GGUFReader` and `gguf.dequantize` on SmolLM2's file, every tensor."""
    checkpoint = open_checkpoint(demo_model, formats)
    slots = [WeightSlot(n, "vector", (Source(n),), i.shape) for n, i in checkpoint.index.tensors.items()]
    theirs = {t.name: t for t in demo_reader.tensors}
    seen = []

    def compare(slot: WeightSlot, tensors: Sequence[StoredTensor]) -> None:
        (tensor,) = tensors
        reference = theirs[checkpoint.entries[slot.name].stored_name]
        got = checkpoint.codec(tensor.format).dequantise(tensor)
        assert np.array_equal(got.numpy(), gguf.dequantize(reference.data, reference.tensor_type)), slot.name
        seen.append(slot.name)

    load_weights(checkpoint, slots, compare, dtype="float32")
    assert len(seen) == len(theirs) == 272
