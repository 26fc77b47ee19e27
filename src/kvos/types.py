"""Value types that every layer may use. Knows nothing of kvos but its errors."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

__all__ = [
    "BlockId",
    "BlockIds",
    "OwnerId",
    "SequenceId",
    "SessionId",
    "SlotIds",
    "TokenIds",
    "TokenPositions",
    "shown",
    "token_array",
]

LONGEST_SHOWN = 200
"""Characters of a wrong value in an error's text."""

BlockId = NewType("BlockId", int)
"""Index of a block in the whole pool, counted over all segments."""

SequenceId = NewType("SequenceId", int)
SessionId = NewType("SessionId", str)

OwnerId = NewType("OwnerId", int)
"""Opaque tag of who wrote a block (one per tenant); scrubbing keeps owners apart."""

BlockIds = npt.NDArray[np.int64]
SlotIds = npt.NDArray[np.int64]
TokenIds = npt.NDArray[np.int32]
TokenPositions = npt.NDArray[np.int64]


def token_array(tokens: npt.ArrayLike) -> TokenIds:
    """A flat int32 array of token ids; copies only if it must."""
    return np.ascontiguousarray(tokens, dtype=np.int32).reshape(-1)


class DType(StrEnum):
    """Compute and cache dtype, by the short names that the field uses."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def shown(value: object) -> str:
    """``value`` in an error's text: cut if that is long, its type if Python can't print it (an int of 5000 digits)."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} too large to show>"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
