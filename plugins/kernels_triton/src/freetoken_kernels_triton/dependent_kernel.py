"""The start of a kernel that may be launched before its predecessor ends; see ``freetoken.ops.dependent_launch``."""

# mypy: ignore-errors
# The bodies are Triton's language, not Python's types.
import triton
import triton.language as tl


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until all that the predecessors wrote is there; then let the next kernel start.

    Without ``PDL`` nothing is done: the launch itself has waited.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
