"""Odd keys of a checksum's words and rows, which PyTorch's operations and the Triton kernel share."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ds_silent.maths.mixing import mix64

ROW = 8192  # 64-bit words
PAIR = -7046029254386353131  # odd: the key of a pair's second word is that of the first times this


@lru_cache(maxsize=1)
def word_keys() -> Tensor:
    """int64 (ROW,) odd keys of a row's words: of pairs, which lie in 16 bytes."""
    pairs = keys_of(ROW // 2, first=1 << 32)  # none of the rows'
    return torch.stack([pairs, pairs * PAIR], 1).view(-1)


def keys_of(count: int, first: int = 1) -> Tensor:
    """int64 (count,) odd keys, those of the numbers from ``first`` on."""
    return torch.from_numpy((mix64(np.arange(first, first + count, dtype=np.uint64)) | np.uint64(1)).view(np.int64))
