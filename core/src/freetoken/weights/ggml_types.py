"""GGML's block types as facts: number in GGUF files, weights in a block, bytes of a block. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class BlockType:
    """``block`` weights along the last axis take ``block_bytes`` bytes."""

    number: int
    block: int
    block_bytes: int

    @property
    def bits(self) -> float:
        """Bits a weight takes, scales included."""
        return 8 * self.block_bytes / self.block


BLOCK_TYPES: Mapping[str, BlockType] = {
    "q4_0": BlockType(2, 32, 18),
    "q4_1": BlockType(3, 32, 20),
    "q5_0": BlockType(6, 32, 22),
    "q5_1": BlockType(7, 32, 24),
    "q8_0": BlockType(8, 32, 34),
    "q2_k": BlockType(10, 256, 84),
    "q3_k": BlockType(11, 256, 110),
    "q4_k": BlockType(12, 256, 144),
    "q5_k": BlockType(13, 256, 176),
    "q6_k": BlockType(14, 256, 210),
    "iq4_nl": BlockType(20, 32, 18),
    "iq4_xs": BlockType(23, 256, 136),
    "mxfp4": BlockType(39, 32, 17),
}
