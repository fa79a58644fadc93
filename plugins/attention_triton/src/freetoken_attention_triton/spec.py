"""The plugin: one attention backend, ``triton``. Imports neither torch nor triton."""

from __future__ import annotations

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.protocols import AttentionBackend, AttentionSetup
from freetoken.plugin.specs import AttentionBackendSpec
from freetoken_attention_triton.launches import launches
from freetoken_attention_triton.probe import probe
from freetoken_attention_triton.workspace import workspace


def _create(setup: AttentionSetup) -> AttentionBackend:
    from freetoken_attention_triton.backend import create

    return create(setup)


SPEC = AttentionBackendSpec(
    name="triton",
    summary="paged attention in Triton: prefill, extend and split-K decode; grouped queries, sliding windows, graphs",
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    head_dims=frozenset({64, 80, 96, 112, 128, 160, 192, 256}),
    create=_create,
    priority=10,
    windows=True,
    graphs=True,
    probe=probe,
    deep_probe="freetoken_attention_triton.probe:deep_probe",
    workspace=workspace,
    launches=launches,
)


@hookimpl
def freetoken_attention_backends() -> tuple[AttentionBackendSpec, ...]:
    return (SPEC,)
