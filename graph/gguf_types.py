"""Element types of GGUF files: how many elements and bytes a block has, by the number that stands in the file.

Source: ggml's type table. Which of them can be read is what the gguf package dequantises.
"""

from __future__ import annotations

from typing import NamedTuple


class ElementType(NamedTuple):
    """One type: rows are whole blocks of ``block`` elements in ``nbytes`` bytes each."""

    name: str
    block: int
    nbytes: int


FLOAT_TYPES = {
    0: ElementType("float32", 1, 4),
    1: ElementType("float16", 1, 2),
    30: ElementType("bfloat16", 1, 2),
}
"""Types that are torch's own, under torch's names."""

BLOCK_TYPES = {
    2: ElementType("Q4_0", 32, 18),
    3: ElementType("Q4_1", 32, 20),
    6: ElementType("Q5_0", 32, 22),
    7: ElementType("Q5_1", 32, 24),
    8: ElementType("Q8_0", 32, 34),
    10: ElementType("Q2_K", 256, 84),
    11: ElementType("Q3_K", 256, 110),
    12: ElementType("Q4_K", 256, 144),
    13: ElementType("Q5_K", 256, 176),
    14: ElementType("Q6_K", 256, 210),
    16: ElementType("IQ2_XXS", 256, 66),
    17: ElementType("IQ2_XS", 256, 74),
    18: ElementType("IQ3_XXS", 256, 98),
    19: ElementType("IQ1_S", 256, 50),
    20: ElementType("IQ4_NL", 32, 18),
    21: ElementType("IQ3_S", 256, 110),
    22: ElementType("IQ2_S", 256, 82),
    23: ElementType("IQ4_XS", 256, 136),
    29: ElementType("IQ1_M", 256, 56),
    34: ElementType("TQ1_0", 256, 54),
    35: ElementType("TQ2_0", 256, 66),
    39: ElementType("MXFP4", 32, 17),
}
"""Types that dequantise to float32 block by block."""

TYPES = FLOAT_TYPES | BLOCK_TYPES
"""Every type that can be read."""

BLOCK_NAMES = frozenset(kind.name for kind in BLOCK_TYPES.values())

OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Types that a file may have and that no weight is read from."""
