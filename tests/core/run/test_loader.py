"""Loading the chosen kernels. Oracle: what each kernel's own ``load`` was given."""

from __future__ import annotations

from attrs import frozen

from freetoken.plugin.protocols import KernelSetup, LoadedKernel
from freetoken.plugin.specs import KernelSpec
from freetoken.run.loader import load_kernels
from freetoken.testing.fakes import make_device
from freetoken.vocab.ops import OpShape


@frozen
class Knobs:
    """A stranger's options."""

    twist: int = 3


def test_a_kernel_is_loaded_once_a_shape_with_its_owners_options() -> None:
    setups: list[KernelSetup] = []

    def load(setup: KernelSetup) -> LoadedKernel:
        setups.append(setup)
        return LoadedKernel(lambda x: x)

    facts = {"summary": "a stranger's", "devices": frozenset({"cpu"}), "dtypes": frozenset({"float32"}), "load": load}
    plain = KernelSpec(op="rope", name="plain", **facts)  # type: ignore[arg-type]
    knobbed = KernelSpec(op="l2norm", name="knobbed", options=Knobs, **facts)  # type: ignore[arg-type]
    shapes = {OpShape("rope", "float32"): plain, OpShape("l2norm", "float32"): knobbed}
    given = Knobs(twist=7)
    loaded = load_kernels(
        shapes, make_device("cpu"), "float32", lambda t: t.parts["data"], 2, lambda cls: given if cls is Knobs else None
    )
    assert loaded.keys() == shapes.keys()
    assert [(s.shape.op, s.threads, s.options) for s in setups] == [("rope", 2, None), ("l2norm", 2, given)]
