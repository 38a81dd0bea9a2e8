"""Mix integers, so that every bit of the input reaches every bit of the output; and odd keys made of that.

Both bit hashes multiply each word by a key of its place: :mod:`ds_silent.maths.fingerprint` is the stronger one, and
:mod:`ds_silent.kernels.checksums` the faster one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment and multipliers, Steele et al., OOPSLA 2014
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
ROW = 8192  # 64-bit words of a checksum's row
WORDS = 4  # a 64-bit hash travels as four 16-bit numbers, which fp32 carries exactly
PAIR = -7046029254386353131  # odd: the key of a pair's second word is that of the first times this


def place_of(parameter: int) -> float:
    """Return 20 bits of a hash of a parameter's number, whose sum over a few says which they are."""
    return float((parameter + 1) * 2654435761 >> 12 & 0xFFFFF)


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


def words_of(hashes: Tensor) -> Tensor:
    """Cut int64 hashes, (...), into words, int64 (..., WORDS), each from 0 to 65,535, the lowest first."""
    return (hashes.unsqueeze(-1) >> shifts_of(WORDS, 16, hashes.device)) & 0xFFFF


@lru_cache(maxsize=8)
def shifts_of(count: int, bits: int, device: torch.device) -> Tensor:
    """int64 (count,) on a device: 0, ``bits``, twice that, ...; made once, so that no step copies it there."""
    return torch.arange(0, count * bits, bits, device=device)


def mixed_ids(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Hash ids of rows: no two ids share one."""
    return mix64(np.ascontiguousarray(ids, dtype=np.int64).view(np.uint64))


def keys_of(count: int, first: int = 1) -> Tensor:
    """int64 (count,) odd keys, those of the numbers from ``first`` on."""
    return torch.from_numpy((mix64(np.arange(first, first + count, dtype=np.uint64)) | np.uint64(1)).view(np.int64))


@lru_cache(maxsize=1)
def word_keys() -> Tensor:
    """int64 (ROW,) odd keys of a checksum's words in a row: of pairs, which lie in 16 bytes."""
    pairs = keys_of(ROW // 2, first=1 << 32)  # none of the rows'
    return torch.stack([pairs, pairs * PAIR], 1).view(-1)
