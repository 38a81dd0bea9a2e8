"""Mix integers, so that every bit of the input reaches every bit of the output."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment and multipliers, Steele et al., OOPSLA 2014
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 of each number: a bijection of 64 bits in which every input bit reaches every output bit."""
    x = values + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX[1])
    mixed: npt.NDArray[np.uint64] = np.bitwise_xor(x, x >> np.uint64(31))
    return mixed


def mixed(x: Tensor) -> Tensor:
    """splitmix64's finalizer in int64 wrap-around arithmetic; ``>>`` of int64 is arithmetic, hence the masks."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed(MIX[0])
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed(MIX[1])
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def signed(value: int) -> int:
    """Return the int64 of the same 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
