from __future__ import annotations

import enum
from typing import Any


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def _part(self, index: int) -> CUDAGraphMode:
        parts: Any = self.value
        return CUDAGraphMode(parts[index]) if self.separate_routine() else self

    def decode_mode(self) -> CUDAGraphMode:
        return self._part(0)

    def mixed_mode(self) -> CUDAGraphMode:
        return self._part(1)

    def separate_routine(self) -> bool:
        return isinstance(self.value, tuple)

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE
