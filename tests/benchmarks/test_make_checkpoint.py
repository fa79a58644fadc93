"""Made-up checkpoints. Oracle: transformers loads every tensor of them, and FreeToken gives the same greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_kinds import KINDS, with_layers
from checkpoint_tensors import MAX_SHARE, fill_gate, popularity, tensors
from make_checkpoint import draw, make_checkpoint, read_router
from safetensors import safe_open

import freetoken
from freetoken.vocab.sampling import SamplingParams

TINY = [kind for kind in KINDS if kind.startswith("tiny")]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=TINY)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    list(make_checkpoint(KINDS[request.param], directory, zipf=1.0, seed=3, shard_bytes=300_000))
    return directory


def load_transformers(directory: Path) -> Any:
    config = json.loads((directory / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    model, info = cls.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def test_greedy_tokens_equal_transformers(made: Path) -> None:
    """Every token that FreeToken chose is transformers' arg max after the same text, or within rounding of it."""
    model = load_transformers(made)
    with freetoken.LLM(str(made), dtype="float32", max_seq_len=256, threads=1) as llm:
        answers = llm.generate(["Hello, world", "one two three four"], GREEDY)
    for answer in answers:
        sequence = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids[:-1]]])
        with torch.no_grad():
            logits = model(input_ids=sequence).logits[0, len(answer.prompt_token_ids) - 1 :]
        assert logits.argmax(-1).tolist() == list(answer.token_ids)
        assert len(set(answer.token_ids)) > 4, "one token over and over shows little"


def test_the_tokenizer_is_read_alike(made: Path) -> None:
    """Oracle: transformers' tokenizer and template."""
    theirs = transformers.AutoTokenizer.from_pretrained(made)
    messages = [{"role": "user", "content": "Hällo t300."}]
    with freetoken.LLM(str(made), dtype="float32", max_seq_len=256, threads=1) as llm:
        ours = llm.chat(messages, SamplingParams(temperature=0, max_tokens=1)).prompt_token_ids
    assert list(ours) == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert theirs.decode([300, 301]) == "t300.t301."


def test_every_shard_is_indexed(made: Path) -> None:
    """Oracle: the files themselves."""
    index = json.loads((made / "model.safetensors.index.json").read_text())
    found = {}
    for file in made.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file.name)
    assert found == index["weight_map"]
    assert len(set(found.values())) > 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TINY])
def test_published_dimensions_have_every_tensor(kind: str) -> None:
    """Oracle: transformers' own model of that configuration, without memory."""
    config = with_layers(KINDS[kind], 4)
    kwargs = {k: v for k, v in config.items() if k != "model_type"}
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(
            transformers.AutoConfig.for_model(config["model_type"], **kwargs)
        )
    theirs = {n: p.numel() for n, p in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del theirs["lm_head.weight"]
    ours: dict[str, int] = {}
    for tensor in tensors(config):
        name = tensor.name
        if ".experts." in name and name.endswith(".weight"):  # one an expert is loaded into two stacks
            stack = "down_proj" if "down_proj" in name else "gate_up_proj"
            name = name.partition(".experts.")[0] + f".experts.{stack}"
        ours[name] = ours.get(name, 0) + torch.Size(tensor.shape).numel()
    assert ours == theirs


def test_values_depend_on_seed_and_name_alone() -> None:
    """Second way: a checkpoint of fewer layers, and another seed."""
    long = {t.name: t for t in tensors(with_layers(KINDS["tiny-qwen3-moe"], 3))}
    name = "model.layers.1.mlp.gate.weight"
    first = draw(long[name], 1, "cpu")
    assert torch.equal(first, draw(long[name], 1, "cpu"))
    assert not torch.equal(first, draw(long[name], 2, "cpu"))
    assert not torch.equal(first, draw(long[name.replace("1", "2")], 1, "cpu"))


@pytest.mark.parametrize("zipf", [0.0, 0.5, 1.0, 2.0])
def test_routers_choose_as_wanted(zipf: float) -> None:
    """Oracle: the chosen shares over 20,000 random states, against the wanted ones."""
    experts, top_k, hidden = 128, 8, 256
    wanted = popularity(experts, top_k, zipf)
    assert sum(wanted) == pytest.approx(top_k)
    assert max(wanted) <= MAX_SHARE
    generator = torch.Generator().manual_seed(0)
    gate = torch.empty(experts, hidden)
    fill_gate(gate, generator, wanted)
    chosen = (torch.randn(20_000, hidden, generator=generator) @ gate.T).topk(top_k).indices
    shares = torch.bincount(chosen.flatten(), minlength=experts).sort(descending=True).values / 20_000
    apart = float((shares - torch.tensor(wanted)).abs().sum()) / (2 * top_k)
    assert apart < 0.1, f"{apart:.1%} of the choices fell to other ranks than wanted"


@pytest.mark.parametrize(("text", "value"), [("uniform", 0.0), ("zipf:1.2", 1.2), ("zipf:0", 0.0)])
def test_router_words(text: str, value: float) -> None:
    assert read_router(text) == value


@pytest.mark.parametrize("text", ["", "zipf", "zipf:", "zipf:-1", "zipf:nan", "zipf:x", "1.0"])
def test_wrong_router_words_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="zipf:S"):
        read_router(text)
