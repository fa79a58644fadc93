"""The core's own options: one field each; flag, variable, file key and docs row are derived."""

from __future__ import annotations

from attrs import frozen

from freetoken.plugin.options import CORE_OWNER, option
from freetoken.plugin.specs import OptionsSpec


@frozen
class CoreOptions:
    """Everything ``freetoken serve`` can be told, apart from what plugins add."""

    # what to serve, and where
    model: str | None = option(
        None, help="directory, .gguf file, installed model package, or hub id; default: the one model package installed"
    )
    served_model_name: str | None = option(None, help="the name clients use; default: the model's own")
    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(1919, help="port to listen on", low=0, high=65535)

    # how to compute
    device: str = option("auto", help="where to compute", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto", help="compute dtype; auto: float32 on a CPU, the checkpoint's on a GPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )  # fmt: skip
    attention_backend: str = option("auto", help="attention backend, see `freetoken plugins`")
    moe_strategy: str = option("auto", help="where experts live, see `freetoken plugins`")
    warmup_policy: str = option("auto", help="warmup policy, see `freetoken plugins`")
    kernel: tuple[str, ...] = option(
        (), help="use the kernel NAME for an op; may be repeated", repeated=True, metavar="OP=NAME"
    )
    cuda_graphs: bool = option(True, help="capture decode steps as CUDA graphs where the backend can")
    threads: int | None = option(None, help="compute threads on a CPU; default: the cores this process may use", low=1)
    load_format: str = option(
        "auto", help="auto: the files; dummy: random weights of the right shapes", choices=("auto", "dummy")
    )

    # how much
    max_seq_len: int | None = option(
        None, help="longest context of a request; default: the model's, as far as memory allows", unit="tokens", low=2
    )
    max_running_requests: int = option(32, help="requests computed at the same time", low=1, high=4096)
    max_prefill_tokens: int | None = option(
        None, help="most new tokens in one step; default 512 on a CPU, 8192 on a GPU", unit="tokens", low=1
    )
    kv_tokens: int | None = option(
        None, help="tokens the KV cache holds; default: what memory allows", unit="tokens", low=1
    )
    page_tokens: int = option(16, help="tokens a KV page holds, where the backend does not need another", unit="tokens",
                              low=1, high=1024)  # fmt: skip
    memory_ratio: float = option(0.9, help="share of the free device memory FreeToken may take", low=0.05, high=1.0)
    device_memory_bytes: int | None = option(
        None, help="cap on the device memory taken, all included", unit="bytes", low=1
    )
    host_memory_bytes: int | None = option(
        None, help="host memory to plan with, where the machine reports too little", unit="bytes", low=1
    )
    prefix_cache: bool = option(True, help="keep and share the KV of earlier prompts")
    snapshot_bytes: int | None = option(
        None, help="budget for recurrent-state snapshots of hybrid models; default: room for 16", unit="bytes", low=0
    )

    # how politely
    max_queue: int = option(256, help="requests that may wait; more are answered 429", low=0)
    max_token_gap_ms: int = option(
        500, help="longest gap between two tokens of a running request that prefill may cause", unit="ms", low=1
    )
    request_timeout_s: float | None = option(None, help="deadline of a request from its arrival", unit="s", low=0.001)
    max_body_bytes: int = option(16 * 1024**2, help="largest request body", unit="bytes", low=1)
    api_key: str | None = option(None, help="key that clients must send as a bearer token")
    drain_timeout_s: float = option(30.0, help="how long a shutdown waits for running requests", unit="s", low=0)

    # warmup and its proof
    on_late_compile: str = option(
        "count", help="a compile, load or tuning run after ready: count it, warn, or fail that step's requests",
        choices=("count", "warn", "error"),
    )  # fmt: skip
    profile_endpoint: bool = option(
        False, help="offer POST /warmup/profile, by which `freetoken warmup verify` has the device's profiler beside it"
    )
    cache_dir: str | None = option(None, help="where manifests and trial results are kept; default ~/.cache/freetoken")


CORE_OPTIONS = OptionsSpec(owner=CORE_OWNER, cls=CoreOptions, summary="the engine and its server")
