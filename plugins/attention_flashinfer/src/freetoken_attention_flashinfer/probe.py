"""Can FlashInfer run here, and if not, in which of its ways does it fail: cheap for listings, deep in a child process.

Cheap: not installed, too old, no card, a card too old, neither a compiler nor prebuilt kernels. Deep: installed, but it
does not import, or is not the library this was written against.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Hardware
from freetoken_attention_flashinfer.kernels import library_version

OLDEST_ARCH = 80
"""Below compute capability 8.0 there is no bfloat16, and the library's tiles are others."""

OLDEST_VERSION = (0, 6, 18)
INSTALL = "pip install 'freetoken-attention-flashinfer[flashinfer]'"
PREBUILT_PACKAGE = "flashinfer_jit_cache"
MODULE_PATTERN = "batch_prefill_with_kv_cache_*/*.so"
DEFAULT_CUDA = Path("/usr/local/cuda")

PASSED = {
    "plan": {"causal", "sm_scale", "q_data_type", "kv_data_type", "max_token_per_sequence", "seq_lens"},
    "run": {"out", "enable_pdl"},
}
"""What is passed to the wrapper's methods by name."""


def probe(hardware: Hardware) -> Availability:
    """Everything that can be known without importing the library."""
    if find_spec("flashinfer") is None:
        return Availability.no("flashinfer is not installed", INSTALL)
    version = library_version()
    if version and _numbers(version) < OLDEST_VERSION:
        least = ".".join(map(str, OLDEST_VERSION))
        return Availability.no(f"flashinfer {version} is installed; {least} is needed", f"{INSTALL} --upgrade")
    device = hardware.device("cuda")
    if device is None:
        return Availability.no("no CUDA device", "use the torch backend, or a machine with an NVIDIA GPU")
    if device.arch < OLDEST_ARCH:
        found = ".".join(map(str, device.compute_capability))
        return Availability.no(f"{device.name} has compute capability {found}; 8.0 is needed", "use the torch backend")
    return _kernels(os.environ)


def _kernels(environment: Mapping[str, str]) -> Availability:
    """Whether the library's kernels are there, or can be built."""
    if has_prebuilt():
        return Availability.yes()
    if environment.get("FLASHINFER_DISABLE_JIT"):
        return Availability.no(
            "FLASHINFER_DISABLE_JIT is set, and flashinfer has no prebuilt kernels here",
            "unset it, or install flashinfer-jit-cache",
        )
    if find_nvcc(environment) is None:
        return Availability.no(
            "flashinfer builds its kernels with nvcc, which is not here, and no prebuilt ones are installed",
            "install the CUDA toolkit (and set CUDA_HOME to it), or install flashinfer-jit-cache",
        )
    if shutil.which("ninja", path=environment.get("PATH")) is None and find_spec("ninja") is None:
        return Availability.no("flashinfer builds its kernels with ninja, which is not here", "pip install ninja")
    return Availability.yes()


def find_nvcc(environment: Mapping[str, str]) -> Path | None:
    """The compiler that the library would use: by its own variable, the toolkit's, the path, then the usual place."""
    named = environment.get("FLASHINFER_NVCC")
    if named:
        return Path(named) if Path(named).exists() else None
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home is None:
        found = shutil.which("nvcc", path=environment.get("PATH"))
        if found is not None:
            return Path(found)
    compiler = Path(home or DEFAULT_CUDA) / "bin" / "nvcc"
    return compiler if compiler.exists() else None


def has_prebuilt() -> bool:
    """Whether attention kernels come with a package of prebuilt ones, or with the library itself. What it built before
    does not count: it looks for the compiler all the same."""
    if find_spec(PREBUILT_PACKAGE) is not None:
        return True
    spec = find_spec("flashinfer")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any(found for place in places for found in (Path(place) / "data" / "aot").glob(MODULE_PATTERN))


def deep_probe(_: Hardware) -> Availability:
    """The library imports, and its wrapper takes what is passed to it. What it says of itself is kept."""
    version = library_version()
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper as Wrapper
        from flashinfer.jit.attention import gen_batch_prefill_module  # noqa: F401
        from flashinfer.prefill import get_batch_prefill_module  # noqa: F401
    except Exception as error:  # whatever its import raises is the reason
        text = f"{type(error).__name__}: {error}"
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        fix = f"pip install the missing {missing}, or {INSTALL}" if missing else f"{INSTALL} --force-reinstall"
        return Availability.no(f"flashinfer {version} is installed, but does not import: {text}", fix)
    for name, wanted in PASSED.items():
        unknown = wanted - inspect.signature(getattr(Wrapper, name)).parameters.keys()
        if unknown:
            lacks = f"its {name} takes no {', '.join(sorted(unknown))}"
            return Availability.no(f"flashinfer {version} is not what this was written against: {lacks}", INSTALL)
    return Availability.yes()


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 6, 18) of ``0.6.18.post1``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
