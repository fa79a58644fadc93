"""The plan as a pure function of options, checkpoint, machine and offers. Oracles: the rules of the design, the sum of
the claims, pickling, and hypothesis over machines; no device, no file and no torch is touched."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.builtin import BUILTINS
from freetoken.config.engine_options import CoreOptions
from freetoken.config.facts import CheckpointFacts
from freetoken.config.resolve import Inputs, Resolved, resolve
from freetoken.memory.broker import DEVICE, claims_on, needed_bytes
from freetoken.models import llama, mixtral, qwen3_next
from freetoken.models.decoder import stored_parameters
from freetoken.plugin.catalog import Catalog, Catalogs, Offer
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.markers import ENTRY_POINT_GROUP
from freetoken.plugin.selection import Selection
from freetoken.plugin.specs import AttentionBackendSpec, ModelFamilySpec, MoEStrategySpec
from freetoken.vocab.availability import Availability
from freetoken.vocab.errors import RefusedPlan
from freetoken.vocab.hardware import Device, Hardware
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.plan import Choice, Plan, Refusal
from freetoken.vocab.units import GIB, MIB
from freetoken.vocab.weight import CheckpointIndex, TensorInfo

# Built-ins only: what else is installed must not change these tests.
BARE = build_plugins(Selection.of(f"no:{p.name}" for p in entry_points(group=ENTRY_POINT_GROUP)), BUILTINS)
CARD = Device("cuda", 0, "a card", (9, 0), 132, 232_448, 80 * GIB, 80 * GIB)
CPU = Hardware(8, 64 * GIB, 64 * GIB, accelerator_problem="no driver is loaded", accelerator_fix="load it")
GPU = Hardware(8, 64 * GIB, 64 * GIB, (CARD,))
FAMILIES = (llama.FAMILY, mixtral.FAMILY, qwen3_next.FAMILY)


def probe_by(hardware: Hardware) -> Callable[[Any], Availability]:
    """Everything whose device is there works."""

    def probe(spec: Any) -> Availability:
        devices = getattr(spec, "devices", frozenset({"cpu"}))
        return Availability(any(hardware.device(kind) for kind in devices), "its device is not here")

    return probe


def inputs(
    family: ModelFamilySpec = llama.FAMILY,
    hardware: Hardware = CPU,
    options: CoreOptions = CoreOptions(),
    *,
    config: Mapping[str, object] | None = None,
    dtype: str = "bfloat16",
    catalogs: Catalogs = BARE.catalogs,
) -> Inputs:
    read = family.tiny() if config is None else config
    index = CheckpointIndex("dummy", {})
    facts = CheckpointFacts("models/tiny", "tiny", read, tuple(read["architectures"]), index, dtype)  # type: ignore[call-overload]
    return Inputs(options, facts, hardware, catalogs, BARE.choose, probe_by(hardware), lambda cls: cls and cls())


def plan(*args: Any, **kwargs: Any) -> Plan:
    found = resolve(inputs(*args, **kwargs))
    assert isinstance(found, Resolved), str(found)
    return found.plan


def refusal(*args: Any, **kwargs: Any) -> Refusal:
    found = resolve(inputs(*args, **kwargs))
    assert isinstance(found, Refusal)
    return found


def because(found: Plan, name: str) -> tuple[object, str]:
    return next((d.value, d.because) for d in found.decisions if d.name == name)


def with_offer(kind: str, spec: Any) -> Catalogs:
    """The built-in catalogs with one more offer, as a stranger's plugin would add it."""
    old: Catalog[Any] = getattr(BARE.catalogs, kind)
    return evolve(BARE.catalogs, **{kind: Catalog(old.kind, {**old.offers, spec.name: Offer(spec, "stranger")})})


def backend(**changes: Any) -> AttentionBackendSpec:
    facts: dict[str, Any] = {
        "name": "fast", "summary": "a stranger's", "devices": frozenset({"cpu", "cuda"}), "priority": 10,
        "dtypes": frozenset({"float32", "bfloat16"}), "create": lambda setup: None,
    }  # fmt: skip
    return AttentionBackendSpec(**{**facts, **changes})


def notes(choice: Choice) -> dict[str, str]:
    return {note.name: note.why for note in choice.candidates}


# ------------------------------------------------------------------------------------------- device and dtype


def test_auto_takes_the_accelerator_where_there_is_one() -> None:
    assert because(plan(hardware=GPU), "device") == ("cuda:0", "an accelerator is there")
    assert because(plan(hardware=CPU), "device") == ("cpu", "no accelerator was found")
    assert because(plan(hardware=GPU, options=CoreOptions(device="cpu")), "device") == ("cpu", "asked for")


def test_a_device_that_is_not_there_is_refused_with_the_probes_words() -> None:
    found = refusal(hardware=CPU, options=CoreOptions(device="cuda"))
    assert found == Refusal("--device cuda", "no driver is loaded", "load it")


def test_a_machine_without_words_still_gets_a_fix() -> None:
    found = refusal(hardware=Hardware(1, GIB, GIB), options=CoreOptions(device="cuda"))
    assert (found.found, found.fix) == ("this machine has none", "use --device cpu")


@pytest.mark.parametrize(
    ("hardware", "asked", "stored", "expected"),
    [
        (CPU, "auto", "bfloat16", "float32"), (CPU, "bfloat16", "float32", "bfloat16"),
        (GPU, "auto", "bfloat16", "bfloat16"), (GPU, "auto", "float16", "float16"),
        (GPU, "auto", "float32", "bfloat16"), (GPU, "float32", "bfloat16", "float32"),
    ],
)  # fmt: skip
def test_the_dtype(hardware: Hardware, asked: str, stored: str, expected: str) -> None:
    found = plan(hardware=hardware, options=CoreOptions(dtype=asked), dtype=stored)
    assert found.dtype == expected
    assert (because(found, "dtype")[1] == "asked for") == (asked != "auto")
    assert all(c.dtype == expected for c in found.model.caches if hasattr(c, "k_dim"))


# ------------------------------------------------------------------------------------------- choices


def test_a_strangers_backend_is_ranked_explained_and_passed_over_by_its_facts() -> None:
    taken = plan(catalogs=with_offer("attention_backends", backend())).attention[0]
    assert (taken.name, notes(taken)["torch"]) == ("fast", "fits, ranked lower")
    for facts, reason in (
        ({"head_dims": frozenset({64})}, "fast serves head sizes 64, not 32"),
        ({"dtypes": frozenset({"float16"})}, "fast computes in float16, not float32"),
        ({"devices": frozenset({"cuda"})}, "it runs on cuda, not on cpu"),
    ):
        passed = plan(catalogs=with_offer("attention_backends", backend(**facts))).attention[0]
        assert (passed.name, notes(passed)["fast"]) == ("torch", reason)


def test_the_page_is_the_asked_one_or_the_first_that_the_backend_takes() -> None:
    catalogs = with_offer("attention_backends", backend(page_tokens=(64, 128)))
    assert plan(catalogs=catalogs).page_tokens == 64
    assert plan(catalogs=catalogs, options=CoreOptions(page_tokens=128)).page_tokens == 128
    assert plan(options=CoreOptions(page_tokens=4)).page_tokens == 4


def test_a_backends_workspace_is_part_of_the_memory() -> None:
    claim = MemoryClaim("fast", "indices", 5 * MIB)
    found = plan(catalogs=with_offer("attention_backends", backend(workspace=lambda setup: (claim,))))
    assert claim in found.claims


def test_every_shape_of_the_model_has_a_kernel_with_its_candidates() -> None:
    found = plan(mixtral.FAMILY)
    ops = {k.shape.op for k in found.kernels}
    assert {"linear", "embedding", "experts", "router_topk", "rope_write", "rms_norm", "sample"} <= ops
    assert all(k.choice.candidates and k.choice.because for k in found.kernels)
    assert len({k.shape for k in found.kernels}) == len(found.kernels)


def test_a_kernel_that_was_asked_for() -> None:
    found = plan(options=CoreOptions(kernel=("linear=torch",)))
    assert {k.choice.because for k in found.kernels if k.shape.op == "linear"} == {"asked for"}


def test_a_kernel_for_an_op_that_the_model_lacks_is_refused() -> None:
    found = refusal(options=CoreOptions(kernel=("l2norm=torch",)))
    assert (found.asked, found.found) == ("--kernel l2norm=torch", "this model never computes l2norm")
    assert "linear" in found.fix


def test_a_kernel_of_another_name_lists_those_of_the_op() -> None:
    found = refusal(options=CoreOptions(kernel=("linear=nothing",)))
    assert found.asked == "--kernel linear=nothing"
    assert "linear=torch" in found.fix


def index_of(made: Inputs, format: str) -> CheckpointIndex:
    """The index of a checkpoint that holds what the Llama family wants, matrices in ``format``."""
    spec = llama.FAMILY.read_config(made.facts.config, "float32")
    pieces = [piece for parameter in stored_parameters(spec) for piece in parameter.pieces]
    kinds = {1: "float32", 2: format}
    infos = [TensorInfo(p.tensor, kinds[len(p.shape)], p.shape, 1, "f.gguf") for p in pieces]
    return CheckpointIndex("gguf", {info.name: info for info in infos})


def test_weight_formats_reach_the_kernels() -> None:
    """A slot's stored format is in the shape that a kernel is picked for."""
    made = inputs()
    found = resolve(evolve(made, facts=evolve(made.facts, index=index_of(made, "gguf.q8_0"))))
    assert isinstance(found, Resolved)
    formats = {k.shape.formats for k in found.plan.kernels if k.shape.op in ("linear", "embedding")}
    assert formats == {("gguf.q8_0",)}


def test_a_tensor_the_files_lack_is_refused_by_its_name() -> None:
    made = inputs()
    found = resolve(evolve(made, facts=evolve(made.facts, index=CheckpointIndex("safetensors", {}))))
    assert isinstance(found, Refusal)
    assert "models/tiny: model." in found.asked
    assert "the files do not hold this tensor" in found.found


def test_tensors_of_another_shape_are_refused_before_anything_is_loaded() -> None:
    made = inputs()
    index = index_of(made, "float32")
    norm = evolve(index.tensors["model.norm.weight"], shape=(64,))
    wrong = CheckpointIndex("gguf", {**index.tensors, norm.name: norm})
    found = resolve(evolve(made, facts=evolve(made.facts, index=wrong)))
    assert isinstance(found, Refusal)
    assert "model.norm.weight in f.gguf gives [64], the configuration asks for [128]" in found.found


def test_an_architecture_nobody_serves_lists_those_that_are_served() -> None:
    found = refusal(config={**llama.tiny(), "architectures": ["NewModelForCausalLM"]})
    assert "NewModelForCausalLM" in found.asked
    assert "LlamaForCausalLM" in found.found


# ------------------------------------------------------------------------------------------- experts


def strategy(**changes: Any) -> MoEStrategySpec:
    facts: dict[str, Any] = {
        "name": "elsewhere", "summary": "a stranger's", "devices": frozenset({"cpu", "cuda"}), "priority": -1,
        "budget": lambda setup: (MemoryClaim("elsewhere", "slots", MIB),), "create": lambda setup: None,
    }  # fmt: skip
    return MoEStrategySpec(**{**facts, **changes})


def test_a_dense_model_takes_any_installed_strategy_and_uses_none() -> None:
    catalogs = with_offer("moe_strategies", strategy())
    for asked in ("auto", "resident", "elsewhere"):
        found = plan(options=CoreOptions(moe_strategy=asked), catalogs=catalogs)
        assert (found.moe.name, found.moe.because) == (asked, "unused: no experts")
    assert "pip install freetoken-moe-offload" in refusal(options=CoreOptions(moe_strategy="offload")).fix


def test_resident_experts_where_they_fit_and_the_next_strategy_where_they_do_not() -> None:
    catalogs = with_offer("moe_strategies", strategy())
    roomy = plan(mixtral.FAMILY, catalogs=catalogs)
    assert roomy.moe.name == "resident"
    need = sum(c.worst_bytes for c in roomy.claims if c.owner not in ("kv",))
    tight = plan(mixtral.FAMILY, catalogs=catalogs, options=CoreOptions(device_memory_bytes=need))
    assert tight.moe.name == "elsewhere"
    assert "its experts need 4.5 MiB" in notes(tight.moe)["resident"]
    assert "--moe-strategy offload" in notes(tight.moe)["resident"]


def test_experts_that_fit_nowhere_are_refused_with_the_numbers_and_the_way_out() -> None:
    roomy = plan(mixtral.FAMILY)
    need = sum(c.worst_bytes for c in roomy.claims if c.owner not in ("kv",))
    found = refusal(mixtral.FAMILY, options=CoreOptions(device_memory_bytes=need))
    assert "4.5 MiB" in found.found
    assert "pip install freetoken-moe-offload" in found.fix


def test_a_strategys_own_refusal_is_its_reason() -> None:
    def no(setup: Any) -> tuple[MemoryClaim, ...]:
        raise RefusedPlan("--elsewhere-slots 1", "a token needs 2", "use at least 2")

    catalogs = with_offer("moe_strategies", strategy(budget=no, priority=99))
    found = plan(mixtral.FAMILY, catalogs=catalogs).moe
    assert notes(found)["elsewhere"] == "--elsewhere-slots 1: a token needs 2 → use at least 2"
    asked = refusal(mixtral.FAMILY, catalogs=catalogs, options=CoreOptions(moe_strategy="elsewhere"))
    assert "a token needs 2" in asked.found


def test_on_a_cpu_what_a_strategy_keeps_in_the_host_counts_all_the_same() -> None:
    """One memory: a claim on the host is a claim on the device."""
    banks = MemoryClaim("elsewhere", "banks", 900 * GIB, where="host")
    huge = strategy(budget=lambda setup: (banks,), priority=99)
    catalogs = with_offer("moe_strategies", huge)
    assert plan(mixtral.FAMILY, catalogs=catalogs).moe.name == "resident"
    found = refusal(mixtral.FAMILY, catalogs=catalogs, options=CoreOptions(moe_strategy="elsewhere"))
    assert "900.0 GiB" in found.found
    assert plan(mixtral.FAMILY, GPU, catalogs=catalogs).moe.name == "elsewhere"


# ------------------------------------------------------------------------------------------- memory


def test_a_model_that_is_too_big_is_refused_with_what_it_takes_and_what_there_is() -> None:
    small = Hardware(2, 512 * MIB, 350 * MIB)
    found = refusal(hardware=small)
    assert "models/tiny" in found.asked
    assert "runtime 300.0 MiB" in found.found
    assert "weights" in found.found
    assert "allowed are 315.0 MiB (--memory-ratio 0.9 of 350.0 MiB free)" in found.found
    for option in ("--max-prefill-tokens", "--max-running-requests", "--memory-ratio"):
        assert option in found.fix


def test_the_cap_counts_where_it_is_lower_than_the_ratio() -> None:
    assert because(plan(hardware=GPU), "memory_bytes") == (72 * GIB, "--memory-ratio 0.9 of 80.0 GiB free")
    capped = plan(hardware=GPU, options=CoreOptions(device_memory_bytes=2 * GIB))
    assert because(capped, "memory_bytes") == (2 * GIB, "--device-memory-bytes")
    loose = plan(hardware=GPU, options=CoreOptions(device_memory_bytes=200 * GIB))
    assert because(loose, "memory_bytes")[0] == 72 * GIB


def test_recurrent_state_is_declared_for_running_requests_and_snapshots() -> None:
    found = plan(qwen3_next.FAMILY, options=CoreOptions(max_running_requests=5))
    slot = found.model.state_slot_bytes
    claim = next(c for c in found.claims if c.owner == "state")
    assert slot > 0
    assert claim.steady_bytes == (5 + 1 + 16) * slot  # one scratch row; sixteen snapshots by default
    none = plan(qwen3_next.FAMILY, options=CoreOptions(max_running_requests=5, prefix_cache=False))
    assert next(c for c in none.claims if c.owner == "state").steady_bytes == 6 * slot
    two = plan(qwen3_next.FAMILY, options=CoreOptions(snapshot_bytes=2 * slot + 1))
    assert two.snapshot_bytes == 2 * slot


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=st.sampled_from(FAMILIES),
    free=st.integers(300 * MIB, 4 * GIB),
    ratio=st.floats(0.05, 1.0),
    running=st.integers(1, 64),
    prefill=st.none() | st.integers(1, 4096),
    seq=st.none() | st.integers(2, 512),
    kv=st.none() | st.integers(1, 200_000),
    gpu=st.booleans(),
)
def test_a_plan_never_declares_more_than_it_may_take(
    family: ModelFamilySpec, free: int, ratio: float, running: int, prefill: int | None, seq: int | None,
    kv: int | None, gpu: bool,
) -> None:  # fmt: skip
    """Oracle: the sum of every part's worst moment; a refusal instead must carry the number it was refused for."""
    card = evolve(CARD, memory_free_bytes=free)
    hardware = Hardware(2, 64 * GIB, 64 * GIB, (card,)) if gpu else Hardware(2, free, free)
    options = CoreOptions(
        memory_ratio=ratio, max_running_requests=running, max_prefill_tokens=prefill, max_seq_len=seq, kv_tokens=kv
    )
    found = resolve(inputs(family, hardware, options))
    if isinstance(found, Refusal):
        assert "iB" in found.found or " B " in found.found
        assert found.fix
        return
    made = found.plan
    taken = needed_bytes(claims_on(made.claims, DEVICE, made.device))
    assert taken <= made.memory_bytes <= free
    assert made.kv_tokens % made.page_tokens == 0
    assert made.kv_tokens - made.page_tokens >= (kv or made.max_seq_tokens)
    assert made.max_prefill_tokens <= made.max_seq_tokens


# ------------------------------------------------------------------------------------------- plain data


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_plan_survives_pickling(family: ModelFamilySpec, hardware: Hardware) -> None:
    """Oracle: the round trip; a worker gets the plan through a pipe."""
    made = plan(family, hardware)
    assert pickle.loads(pickle.dumps(made)) == made


def test_the_same_inputs_give_the_same_plan() -> None:
    assert plan(mixtral.FAMILY) == plan(mixtral.FAMILY)


def test_planning_imports_no_torch() -> None:
    """Oracle: ``sys.modules`` of a fresh interpreter that has just planned a model."""
    code = """
import sys
from freetoken.builtin import BUILTINS
from freetoken.config.engine_options import CoreOptions
from freetoken.config.facts import CheckpointFacts
from freetoken.config.resolve import Inputs, Resolved, resolve
from freetoken.models import llama
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.report import availability
from freetoken.plugin.selection import Selection
from freetoken.vocab.hardware import Hardware
from freetoken.vocab.weight import CheckpointIndex
plugins, config = build_plugins(Selection(), BUILTINS), llama.tiny()
hardware = Hardware(2, 2**36, 2**36)
facts = CheckpointFacts("t", "t", config, tuple(config["architectures"]), CheckpointIndex("dummy", {}), "float32")
inputs = Inputs(CoreOptions(), facts, hardware, plugins.catalogs, plugins.choose,
                lambda spec: availability(spec, hardware, False), lambda cls: cls and cls())
assert isinstance(resolve(inputs), Resolved)
assert "torch" not in sys.modules, "planning imported torch"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
