"""Tile tables and launch functions: pure, within every card's shared memory, and covering all the work."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetoken.testing.launches import DEVICES
from freetoken.vocab.hardware import Hardware
from freetoken.vocab.ops import OpShape
from freetoken_kernels_triton import experts, gated_delta, linear
from freetoken_kernels_triton.experts_tiles import choose_form
from freetoken_kernels_triton.probe import probe
from freetoken_kernels_triton.tiles import (
    GemmTile,
    fit_stages,
    next_power_of_2,
    power_of_2_divisor,
    row_multiple,
    row_tile,
)

DEVICE = st.sampled_from(list(DEVICES.values()))
DTYPE = st.sampled_from(["bfloat16", "float16", "float32"])


@given(st.integers(1, 1 << 20))
def test_powers_of_two(n):
    """Oracle: the definitions."""
    power = next_power_of_2(n)
    assert power // 2 < n <= power
    divisor = power_of_2_divisor(n, 512)
    assert n % divisor == 0
    assert divisor == 512 or n % (2 * divisor)


@given(st.integers(8, 16384))
def test_row_tiles_hold_a_row_and_sixteen_values_a_thread(cols):
    tile = row_tile(cols)
    assert tile.cols >= cols
    assert tile.rows * tile.cols <= max(2048, tile.cols)
    assert 1 <= tile.num_warps <= 16


@given(
    st.sampled_from([16, 64, 128, 256]), st.sampled_from([16, 64, 128, 256]), st.sampled_from([32, 64, 128, 256]),
    st.integers(2, 6), DTYPE, DEVICE,
)  # fmt: skip
def test_fitted_tiles_stay_within_shared_memory(m, n, k, stages, dtype, device):
    fitted = fit_stages(GemmTile(m, n, k, 4, stages), dtype, device)
    assert (fitted.m, fitted.n) == (m, n)
    assert fitted.num_stages >= 2
    assert fitted.shared_bytes(dtype) < device.shared_memory_bytes


@given(
    st.integers(1, 20000), st.integers(1, 40), st.integers(1, 40), st.integers(4, 300), st.integers(1, 16), DTYPE,
    DEVICE,
)  # fmt: skip
def test_forms_of_experts(tokens, hidden, inner, count, top_k, dtype, device):
    """Property: the two products of a form share their rows, and tiles fit the card."""
    step = row_multiple(dtype)
    shape = OpShape(
        "experts", dtype, cols=hidden * step, intermediate=inner * step, experts=count, top_k=min(top_k, count)
    )
    form = choose_form(tokens, shape, device)
    assert form.up.m == form.down.m
    if form.name == "slot":
        assert tokens * shape.top_k <= 512
    if form.name != "pair":
        for tile in (form.up, form.down):
            assert tile.shared_bytes(dtype) < device.shared_memory_bytes
            assert (tile.m * tile.k) >= 256  # what a matrix instruction needs
    launches = experts.step_launches(tokens, count, shape.cols, shape, device)
    assert all(min(launch.grid) >= 1 for launch in launches)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=70), st.sampled_from([16, 64, 128]))
def test_tile_places_of_slots_never_overlap(counts, rows):
    """Oracle: brute force over the formula that the alignment kernel uses, for any counts of pairs a slot."""
    total = experts.num_tiles(sum(counts), len(counts), rows)
    start = end = 0
    for slot, count in enumerate(counts):
        first = start // rows + slot
        assert first >= end
        end = first + math.ceil(count / rows)
        start += count
    assert end <= total


@given(st.lists(st.integers(1, 400), min_size=1, max_size=70), st.sampled_from([32, 64]))
def test_every_block_of_tokens_finds_its_sequence(lengths, rows):
    """Oracle: a walk over the sequences. The grid holds all blocks, and each is claimed once."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    claimed = set()
    for block in range(sum(lengths) // rows + len(lengths)):
        sequence = sum(start // rows + i <= block for i, start in enumerate(starts)) - 1
        local = block - (starts[sequence] // rows + sequence)
        if local * rows < lengths[sequence]:
            claimed.add((sequence, local))
    assert claimed == {(i, c) for i, n in enumerate(lengths) for c in range(math.ceil(n / rows))}


@given(st.integers(1, 300_000), st.integers(1, 4000), DEVICE)
def test_linear_covers_every_output(outputs, eighths, device):
    shape = OpShape("linear", "bfloat16", rows=outputs, cols=8 * eighths)
    for rows in (1, 2, 16):
        launch = linear.launch(rows, shape.cols, shape, device)
        assert launch.grid[0] * dict(launch.constexprs)["BLOCK_N"] >= outputs


@given(DEVICE)
def test_state_scan_fits(device):
    """The table's estimate against what the compiler took on sm_90 for three stages: 188,936 bytes."""
    shape = OpShape("gated_delta", "bfloat16", q_heads=16, kv_heads=32, head_dim=128, v_dim=128)
    stages = gated_delta.scan_stages(shape, device)
    assert 1 <= stages <= 3
    assert stages * 188_936 / 3 <= device.shared_memory_bytes


def test_probe_says_why_and_what_to_do():
    """Oracle: machines without a GPU, with an old one, with a current one."""
    assert probe(Hardware()).fix
    assert probe(Hardware(accelerators=(DEVICES["h200"],)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the deep probe succeeds where there is a GPU")
def test_deep_probe_reports_the_missing_driver():
    """Oracle: the core's own child process, on a machine without a GPU."""
    from freetoken.plugin.probe import deep_probe
    from freetoken_kernels_triton.spec import DEEP_PROBE

    found = deep_probe(DEEP_PROBE, Hardware(accelerators=(DEVICES["h200"],)))
    assert not found
    assert "driver" in found.reason
    assert found.fix


def test_nothing_imports_torch_or_triton_before_it_is_needed():
    """Oracle: a fresh interpreter that imports the plugin."""
    import subprocess
    import sys

    code = "import sys, freetoken_kernels_triton.spec; print(any(m in sys.modules for m in ('torch', 'triton')))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_kernel_files_import_triton_only():
    """Workers compile them without torch. Oracle: the files' own import statements."""
    import ast
    from pathlib import Path

    import freetoken_kernels_triton

    for path in Path(freetoken_kernels_triton.__file__).parent.glob("*_kernel.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                allowed = name.startswith("triton") or (
                    name.startswith("freetoken_kernels_triton.") and name.endswith("_kernel")
                )
                assert allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("spec_dtype", ["bfloat16", "float32"])
def test_rows_that_are_not_aligned_are_refused(spec_dtype):
    from freetoken_kernels_triton.spec import SPECS

    norm = next(s for s in SPECS if s.op == "rms_norm")
    assert not norm.serves(OpShape("rms_norm", spec_dtype, cols=2047))
    assert norm.serves(OpShape("rms_norm", spec_dtype, cols=2048))
