"""A growable array of integers: list-like growth, array-like reading."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["IntVector"]


class IntVector:
    """Amortised O(1) append; ``view`` is a read-only window that stays right until the next change."""

    def __init__(self, dtype: npt.DTypeLike, values: npt.ArrayLike = ()) -> None:
        initial = np.array(values, dtype=dtype)
        self._data: npt.NDArray[Any] = initial
        self._length = len(initial)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return int(self._data[index])

    def __setitem__(self, index: int, value: int) -> None:
        if not 0 <= index < self._length:
            raise IndexError(index)
        self._data[index] = value

    def extend(self, values: npt.NDArray[Any]) -> None:
        end = self._length + len(values)
        if end > len(self._data):
            wider = np.zeros(max(end, 2 * len(self._data), 16), self._data.dtype)
            wider[: self._length] = self._data[: self._length]
            self._data = wider
        self._data[self._length : end] = values
        self._length = end

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def view(self, start: int = 0, end: int | None = None) -> npt.NDArray[Any]:
        window = self._data[start : self._length if end is None else min(end, self._length)]
        window.flags.writeable = False
        return window
