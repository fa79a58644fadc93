"""The plugin: one attention backend, ``flashinfer``. Imports neither torch nor flashinfer."""

from __future__ import annotations

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.protocols import AttentionBackend, AttentionSetup
from freetoken.plugin.specs import AttentionBackendSpec
from freetoken_attention_flashinfer.launches import launches
from freetoken_attention_flashinfer.probe import probe
from freetoken_attention_flashinfer.rank import because, priority
from freetoken_attention_flashinfer.workspace import workspace


def _create(setup: AttentionSetup) -> AttentionBackend:
    from freetoken_attention_flashinfer.backend import create

    return create(setup)


SPEC = AttentionBackendSpec(
    name="flashinfer",
    summary="FlashInfer's paged attention: prefill, extend and decode; grouped queries, graphs",
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    head_dims=frozenset({64, 128, 256}),
    create=_create,
    priority=priority(),
    ranking=because(),
    graphs=True,
    probe=probe,
    deep_probe="freetoken_attention_flashinfer.probe:deep_probe",
    workspace=workspace,
    launches=launches,
)


@hookimpl
def freetoken_attention_backends() -> tuple[AttentionBackendSpec, ...]:
    return (SPEC,)
