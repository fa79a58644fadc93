"""How many threads torch computes with: a pure rule from the cores this process may use."""

from __future__ import annotations

ENGINE_ALONE_CORES = 4  # from here on a core is left to the HTTP process, which tokenises and streams
MOST_LOADING = 4
DEVICE_THREADS = 4  # with the work on a GPU: copies and index arithmetic only


def compute_threads(cores: int, asked: int | None = None, *, device_kind: str = "cpu") -> int:
    """Threads for torch's operators in the engine process; ``asked`` wins.

    On a CPU every core counts on small machines: with two cores, one thread less costs nearly half the speed, while the
    HTTP process is idle most of the time. More threads than cores are never taken unasked: two processes of two threads
    on two cores measured 3.5 times slower than two of one.
    """
    if asked is not None:
        return max(1, asked)
    cores = max(1, cores)
    if device_kind != "cpu":
        return min(cores, DEVICE_THREADS)
    return cores if cores < ENGINE_ALONE_CORES else cores - 1


def loading_threads(compute: int, device_kind: str) -> int:
    """Threads that pack weights side by side, each with operators of one thread. Packing is made of many short
    operators, which two threads each slow down rather than speed up; each thread holds one more matrix in memory."""
    return min(compute, MOST_LOADING) if device_kind == "cpu" else 1


def thread_environment(threads: int) -> dict[str, str]:
    """Variables to set in the engine process before torch is imported, where the user has not set them.

    Threads that wait between operators spin for a moment and then sleep. SmolLM2 on two idle cores, tokens a second of
    1 and of 8 streams: spinning without end 36 and 169, this 33 and 147, sleeping at once 19 and 93. Beside another
    process that wants a core, spinning without end made an operator take 11 ms instead of 1.
    """
    return {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "10000"}
