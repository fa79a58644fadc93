"""How a family's chat text is marked: what the API must know beyond the template."""

from __future__ import annotations

from attrs import frozen


@frozen
class ChatFormat:
    """Markers in the generated text. ``fallback_template`` is used only when the checkpoint brings none."""

    fallback_template: str | None = None
    reasoning_start: str | None = None
    reasoning_end: str | None = None
