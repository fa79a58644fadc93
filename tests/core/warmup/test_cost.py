"""What a step is expected to take. Oracle: the unit costs, on steps small enough to count."""

import pytest

from freetoken.vocab.warmup import CompileKeys
from freetoken.warmup.cost import BUILD_MODULE_S, COMPILE_KEY_S, expected_seconds


@pytest.mark.parametrize(
    ("keys", "workers", "seconds"),
    [
        (("a", "b", "c", "d"), 2, 2 * COMPILE_KEY_S),
        (("a",), 16, COMPILE_KEY_S),
        (("native:library/module",), 16, BUILD_MODULE_S / 16),
        (("a", "b", "native:one", "native:two"), 4, BUILD_MODULE_S / 2),
    ],
)
def test_a_native_build_counts_as_what_it_is_and_runs_beside_the_compiles(
    keys: tuple[str, ...], workers: int, seconds: float
) -> None:
    assert expected_seconds(CompileKeys(keys, workers)) == pytest.approx(seconds)
