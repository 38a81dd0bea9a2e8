"""Hash a tensor's values so that the hash of a whole follows from those of its pieces.

    joined((weight_hash(q), q.numel()), (weight_hash(k), k.numel())) == weight_hash(torch.cat((q, k)))

With mixed words m(w_i) and an odd P, h = sum_i m(w_i) P^i mod 2^64 over the elements in their logical order. So a
piece that begins at element o of the whole contributes P^o h(piece): a fused weight is told from its parts' hashes.

* One changed element changes h: m is a bijection of 64 bits, and P^i is odd.
* Two swapped elements change h: (m(a) - m(b)) (P^i - P^j) is 0 mod 2^64 only where the powers of two in both factors
  add up to 64: for random words a chance of at most 65 in 2^64.
* Any other difference is missed with a probability of about 2^-64. Not cryptographic: for faults, not for adversaries.

Floating-point numbers of up to 32 bits are hashed as fp32, which holds each of them exactly: a bf16 tensor and its fp32
copy have one hash. Other dtypes are hashed as 64-bit words.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ds_silent.maths.mixing import GOLDEN, MIX, signed

BLOCK = 1 << 16  # elements hashed at once: 512 KB of int64, which stay in a CPU's cache
_MASK = (1 << 64) - 1
_MULTIPLIER = GOLDEN  # 5 mod 8, so that its powers repeat after 2^62 elements only


def weight_hash(tensor: Tensor) -> int:
    """Hash a dense tensor of any shape and device: 0 to 2^64 - 1, 0 if it is empty. It waits for the device."""
    flat = tensor.detach().reshape(-1)
    powers, total = _powers(flat.device), 0
    for begin in range(0, flat.numel(), BLOCK):
        words = _mixed(flat[begin : begin + BLOCK])
        total += int((words * powers[: len(words)]).sum()) * _power(begin)
    return total & _MASK


def joined(*pieces: tuple[int, int]) -> int:
    """Return the hash of pieces one behind the other, each given as (hash, elements)."""
    total, offset = 0, 0
    for piece, elements in pieces:
        total += piece * _power(offset)
        offset += elements
    return total & _MASK


def _mixed(values: Tensor) -> Tensor:
    """int64 words of a block, mixed: every bit of an element reaches the lower bits, and no small change cancels."""
    if values.is_complex():
        return _mixed(values.real) * signed(MIX[0]) + _mixed(values.imag)
    if values.dtype.is_floating_point:
        wide = values if values.dtype == torch.float64 else values.float()
        words = wide.contiguous().view(torch.int64 if wide.dtype == torch.float64 else torch.int32).long()
    else:
        words = values.long()
    words = (words + 1) * signed(MIX[0])
    words = (words ^ ((words >> 32) & 0xFFFFFFFF)) * signed(MIX[1])
    return words ^ ((words >> 32) & 0xFFFFFFFF)


@lru_cache(maxsize=8)
def _powers(device: torch.device) -> Tensor:
    """int64 (BLOCK,): P^i mod 2^64, by doubling."""
    powers = torch.ones(1, dtype=torch.int64)
    while len(powers) < BLOCK:
        powers = torch.cat((powers, powers * signed(_power(len(powers)))))
    return powers.to(device)


def _power(exponent: int) -> int:
    return pow(_MULTIPLIER, exponent, 1 << 64)
