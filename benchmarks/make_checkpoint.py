"""Make a real checkpoint of random weights: bf16 safetensors in the hub's layout, configuration, tokenizer, template.

    python benchmarks/make_checkpoint.py qwen3-30b-a3b DIR [--layers N] [--router uniform|zipf:S] [--seed N]

transformers, vLLM and FreeToken load it. Weights are drawn on the GPU where there is one and written shard by shard,
so that one shard is in memory at a time. A tensor's values depend on the seed, its name and its shape alone, so that
fewer layers give the same first layers; they differ between GPU and CPU, whose generators differ.

``checkpoint_tensors.py`` says what the values are drawn from and how ``--router`` decides which experts are popular.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from checkpoint_kinds import KINDS, Config, text_config, with_layers
from checkpoint_tensors import Tensor, tensors
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHARD_BYTES = 4 * 1024**3
SPECIAL = (
    "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|image_pad|>", "<|video_pad|>",
    "<|vision_start|>", "<|vision_end|>",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(
    config: Config, directory: Path, *, zipf: float = 0.0, seed: int = 0, device: str = "cpu",
    shard_bytes: int = SHARD_BYTES,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Write everything; yields bytes written and bytes in all after each shard."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = list(split(tensors(config, zipf), shard_bytes))
    total, done = sum(t.num_bytes for shard in shards for t in shard), 0
    where = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({t.name: draw(t, seed, device) for t in shard}, directory / name, metadata={"format": "pt"})
        where |= {t.name: name for t in shard}
        done += sum(t.num_bytes for t in shard)
        yield done, total
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], "do_sample": False}))
    write_tokenizer(directory, text_config(config)["vocab_size"])


def split(all_tensors: Iterable[Tensor], shard_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors in order, in groups of at most ``shard_bytes``; a larger one is a group of its own."""
    shard: list[Tensor] = []
    size = 0
    for tensor in all_tensors:
        if shard and size + tensor.num_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    yield shard


def draw(tensor: Tensor, seed: int, device: str) -> torch.Tensor:
    """The tensor's values, on the CPU."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {tensor.name}".encode()))
    out = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
    tensor.fill(out, generator)
    return out.cpu()


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level tokenizer without merges, whose every id beyond the bytes decodes to visible text of its own."""
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    while len(vocab) < vocab_size:
        vocab[f"t{len(vocab)}."] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|pad|>",
        "bos_token": "<|bos|>", "chat_template": TEMPLATE, "model_max_length": 262144,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def read_router(text: str) -> float:
    """``uniform`` → 0, ``zipf:1.2`` → 1.2."""
    if text == "uniform":
        return 0.0
    try:
        value = float(text.removeprefix("zipf:")) if text.startswith("zipf:") else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text!r}: write uniform, or zipf:S with S between 0 and 10")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="instead of the published number")
    parser.add_argument("--router", type=read_router, default=0.0, help="uniform (default) or zipf:S")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to draw")
    given = parser.parse_args()
    start = time.perf_counter()
    config = with_layers(KINDS[given.kind], given.layers)
    for done, total in make_checkpoint(
        config, given.directory, zipf=given.router, seed=given.seed, device=given.device
    ):
        print(f"{done / 2**30:.1f} of {total / 2**30:.1f} GiB, {time.perf_counter() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
