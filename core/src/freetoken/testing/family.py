"""The conformance suite of a model family: subclass, name the family, run it with pytest.

class TestMine(FamilyConformance):
    family = my_plugin.FAMILY

    def write(self, directory): ...         # a small checkpoint; built-in families have a writer already
    def oracle(self, directory): ...        # another implementation of the same model
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freetoken.builtin.weight_formats import freetoken_weight_formats
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.mini_model import load_mini_model
from freetoken.testing.mini_runner import MiniRunner
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import CheckpointIndex
from freetoken.weights.checkpoint import Checkpoint, open_checkpoint
from freetoken.weights.slots import check_slots

Oracle = Callable[[Sequence[int]], Tensor]
"""Tokens of one sequence → logits ``[T, V]`` of another implementation, float32."""


class FamilyConformance:
    """What every family must do, at its ``tiny`` size, in float32 on the CPU."""

    family: ModelFamilySpec
    tolerance: float = 1e-4
    prompt_tokens: int = 45  # no multiple of a page or of a chunk
    decode_tokens: int = 32

    def write(self, directory: Path) -> None:
        """Write a small checkpoint of the family into ``directory``."""
        write_tiny(self.family, directory)

    def oracle(self, directory: Path) -> Oracle | None:
        """Another implementation of the checkpoint in ``directory``, where there is one."""
        return None

    @pytest.fixture(scope="class")
    def path(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("tiny")
        self.write(directory)
        return directory

    @pytest.fixture
    def checkpoint(self, path: Path) -> Iterator[Checkpoint]:
        with open_checkpoint(path, tuple(freetoken_weight_formats())) as opened:
            yield opened

    @pytest.fixture(scope="class")
    def runner(self, path: Path) -> MiniRunner:
        return MiniRunner.open(self.family, path)

    @pytest.fixture
    def prompt(self, runner: MiniRunner) -> list[int]:
        return self.tokens(runner, 1, self.prompt_tokens)

    def tokens(self, runner: MiniRunner, seed: int, count: int) -> list[int]:
        """``count`` random tokens."""
        generator = torch.Generator().manual_seed(seed)
        drawn: list[int] = torch.randint(runner.spec.vocab_size, (count,), generator=generator).tolist()
        return drawn

    def near(self, got: Tensor, want: Tensor) -> bool:
        """Whether the logits agree; says by how much they do not."""
        worst = float((got - want).abs().max())
        assert worst <= self.tolerance, f"logits differ by up to {worst:.2g}, {self.tolerance:.2g} is allowed"
        return True

    # ------------------------------------------------------------------------------------------------ what it says

    def test_spec_is_consistent(self) -> None:
        """Property: one cache per layer, attention groups over paged layers alone, experts within the layers."""
        spec = self.family.read_config(self.family.tiny(), "float32")
        assert len(spec.caches) == spec.num_layers
        grouped = [layer for group in spec.attention for layer in group.layers]
        assert sorted(grouped) == [i for i, cache in enumerate(spec.caches) if isinstance(cache, PagedKV)]
        assert all(spec.caches[layer] == group.cache for group in spec.attention for layer in group.layers)
        assert spec.moe is None or set(spec.moe.layers) <= set(range(spec.num_layers))

    def test_spec_can_cross_processes(self) -> None:
        """Round trip through pickle: the plan that holds it goes from process to process."""
        spec = self.family.read_config(self.family.tiny(), "bfloat16")
        assert pickle.loads(pickle.dumps(spec)) == spec

    def test_parameters_are_counted(self) -> None:
        """Second count: the slots' sizes, matrices of one tied tensor once."""
        spec = self.family.read_config(self.family.tiny(), "float32")
        counted: dict[object, int] = {}
        for slot in self.family.weights(spec, CheckpointIndex("dummy")):
            counted[slot.sources] = prod(slot.shape) * (3 if slot.kind == "experts" else 1)
        assert spec.parameters == sum(counted.values())

    def test_parts_are_listed(self) -> None:
        """Property: ``op_shapes`` has embed, every layer and head, in order, without weight formats."""
        spec = self.family.read_config(self.family.tiny(), "float32")
        parts = self.family.op_shapes(spec, "float32")
        assert [name for name, _ in parts] == ["embed", *(f"layers.{i}" for i in range(spec.num_layers)), "head"]
        assert all(not shape.formats for _, shapes in parts for shape in shapes)

    # ------------------------------------------------------------------------------------------------ what it reads

    def test_every_tensor_is_used_or_ignored(self, checkpoint: Checkpoint) -> None:
        """Property: the loader's own check of names and shapes passes."""
        slots = self.family.weights(self.family.read_config(checkpoint.config, "float32"), checkpoint.index)
        check_slots(checkpoint.index, slots, ignored=self.family.ignored_tensors)

    def test_a_missing_tensor_is_named(self, checkpoint: Checkpoint) -> None:
        """Property: whichever tensor a slot needs is missing, the error names it."""
        spec = self.family.read_config(checkpoint.config, "float32")
        needed = {s.tensor for slot in self.family.weights(spec, checkpoint.index) for s in slot.sources}
        for name in sorted(needed)[:: max(1, len(needed) // 20)]:
            left = CheckpointIndex("safetensors", {n: t for n, t in checkpoint.index.tensors.items() if n != name})
            with pytest.raises(CheckpointError) as refused:
                check_slots(left, self.family.weights(spec, left), ignored=self.family.ignored_tensors)
            assert name in str(refused.value)

    def test_a_size_that_contradicts_the_tensors_is_refused(self, checkpoint: Checkpoint) -> None:
        """Property: a configuration with another vocabulary does not load."""
        config = json.loads(json.dumps(dict(checkpoint.config)))
        config.get("text_config", config)["vocab_size"] += 8
        slots = self.family.weights(self.family.read_config(config, "float32"), checkpoint.index)
        with pytest.raises(CheckpointError):
            check_slots(checkpoint.index, slots, ignored=self.family.ignored_tensors)

    # ------------------------------------------------------------------------------------------------ what it computes

    def test_prefill_equals_the_oracle(self, runner: MiniRunner, path: Path, prompt: list[int]) -> None:
        """Oracle: another implementation."""
        assert self.near(runner.logits(prompt), self._oracle(path)(prompt))

    def test_greedy_decode_equals_the_oracle(self, runner: MiniRunner, path: Path, prompt: list[int]) -> None:
        """Oracle: another implementation, asked once for the whole text."""
        chosen, logits = runner.greedy(prompt, self.decode_tokens)
        want = self._oracle(path)([*prompt, *chosen[:-1]])[len(prompt) - 1 :]
        assert self.near(logits, want)
        assert chosen == want.argmax(-1).tolist()

    def test_decode_equals_prefill(self, runner: MiniRunner, prompt: list[int]) -> None:
        """Second way: token by token after a short prompt, and the whole at once."""
        sequence = runner.new_sequence()
        rows = [runner.step([(sequence, prompt[:9])])[0]]
        rows += [runner.step([(sequence, [token])])[0] for token in prompt[9:]]
        assert self.near(torch.cat(rows), runner.logits(prompt))

    @pytest.mark.parametrize("chunk", [2, 7, 16])
    def test_chunks_equal_the_whole(self, runner: MiniRunner, prompt: list[int], chunk: int) -> None:
        """Second way: the prompt in chunks, and at once."""
        assert self.near(runner.logits(prompt, chunk), runner.logits(prompt))

    def test_ragged_batches_equal_single_sequences(self, runner: MiniRunner) -> None:
        """Second way: prefill, extend and decode rows in one batch, and each sequence alone."""
        texts = [self.tokens(runner, seed, count) for seed, count in enumerate((33, 1, 17, 20), start=2)]
        steps = [(20, 1, 0, 16), (1, 0, 17, 3), (12, 0, 0, 1)]
        sequences = [runner.new_sequence() for _ in texts]
        rows: list[list[Tensor]] = [[] for _ in texts]
        for counts in steps:
            present = [i for i, count in enumerate(counts) if count]
            done = [sequences[i].tokens for i in present]
            work = [(sequences[i], texts[i][at : at + counts[i]]) for i, at in zip(present, done, strict=True)]
            for i, logits in zip(present, runner.step(work), strict=True):
                rows[i].append(logits)
        for text, got in zip(texts, rows, strict=True):
            assert self.near(torch.cat(got), runner.logits(text))

    def test_a_shared_prefix_equals_its_own(self, runner: MiniRunner, prompt: list[int]) -> None:
        """Second way: a continuation on another sequence's pages and state, and the whole text on its own."""
        donor = runner.new_sequence()
        runner.step([(donor, prompt[:32])])
        heir = runner.fork(donor)
        runner.step([(donor, self.tokens(runner, 9, 5))])
        assert self.near(runner.step([(heir, prompt[32:])])[0], runner.logits(prompt)[32:])

    def test_made_up_weights_run(self, path: Path) -> None:
        """Property: a configuration without weights builds and gives finite logits."""
        runner = MiniRunner(load_mini_model(self.family, path, dummy=True))
        assert bool(runner.logits(self.tokens(runner, 1, 5)).isfinite().all())

    def test_half_precision_runs(self, runner: MiniRunner, path: Path, prompt: list[int]) -> None:
        """Oracle: the same model in float32, within what bfloat16's 8 bits allow in the middle row.

        Not in every row: where two experts are nearly tied, rounding picks the other. Over six prompts the median of
        the tiny mixtures of experts was 0.03 to 0.12.
        """
        rounded = MiniRunner.open(self.family, path, dtype="bfloat16").logits(prompt, 16)
        exact = runner.logits(prompt)
        assert rounded.dtype == torch.float32
        assert float(((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).median()) < 0.15

    def _oracle(self, path: Path) -> Oracle:
        oracle = self.oracle(path)
        if oracle is None:
            pytest.skip("no other implementation was named")
        return oracle
