"""Bit hashes: do two ranks hold the same bits? Of tensors on their device, of text, of random-number generators.

    tensor_hash(parameter)             # int32 (2,) on the parameter's device, nothing waited for
    hash_text("seed 42")               # (int, int), each an int32

Two int32 are what every collective carries unchanged. Not cryptographic: for faults, not for adversaries.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_silent.device import generator_state
from ds_silent.maths.mixing import GOLDEN, keys_of, signed

Hash = tuple[int, int]

KEYS = 1 << 14  # words per row; their keys take 128 KB
ROWS = 4  # rows hashed at once on a CPU, so that the int64 temporaries (512 KB) stay in its cache
DEVICE_ROWS = 64  # and on an accelerator: 8 MB, so that few kernels are launched; the hash is the same
_MASK = (1 << 32) - 1


def tensor_hash(tensor: Tensor) -> Tensor:
    """64-bit hash of a tensor's bits, dtype, shape and order of dimensions in memory, as int32 (2,) on its device.

    The bits are read as 32-bit words w; with odd keys k, h = sum_i w_i k_i mod 2^64 over rows of ``KEYS`` words, rows
    chained by h <- h P + row. The keys' lower halves differ, so that k_i - k_j is no multiple of 2^32:

    * one changed word changes h: d k_i is not 0 mod 2^64, for k_i is odd and 0 < |d| < 2^32;
    * two swapped elements of up to 32 bits within a row of 16,384 words change h: d (k_i - k_j) is not 0;
    * any other difference, swaps across rows too, is missed with a probability of about 2^-64 (2^-32 at worst, when
      the difference is in the sign bits of fp32 words alone).

    Memory: at most 8 MB of temporaries, whatever the size; only a tensor whose elements do not lie densely is copied.
    No host synchronisation, no collective. Time: 2.5 GB/s on one CPU core.
    """
    flat, order = _flat(tensor.detach())
    seed = hash_text(f"{tensor.dtype} {tuple(tensor.shape)} {order}")
    total = torch.full((), _joined(seed), dtype=torch.int64, device=tensor.device)
    keys, powers = _keys(tensor.device)
    for words in _words(flat):
        whole = len(words) // KEYS
        if whole:
            rows = (words[: whole * KEYS].view(whole, KEYS) * keys).sum(1)
            total = total * powers[whole] + (rows * powers[:whole].flip(0)).sum()
        rest = words[whole * KEYS :]
        if len(rest):
            total = total * powers[1] + (rest * keys[: len(rest)]).sum()
    total = total ^ ((total >> 32) & _MASK)  # the lower half alone would not know of the upper bits
    low, high = ((total << 32) >> 32), (total >> 32)
    return torch.stack((low, high)).to(torch.int32)


def hash_text(text: str) -> Hash:
    """64-bit BLAKE2b of the text's UTF-8 bytes as two int32."""
    return hash_bytes(text.encode("utf-8", "surrogatepass"))


def hash_bytes(data: bytes) -> Hash:
    """64-bit BLAKE2b as two int32."""
    low, high = np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), dtype="<i4").tolist()
    return low, high


def short_hash(value: Any) -> float:
    """24-bit BLAKE2b of a value's ``repr``: 1 to 2**24 - 1, which fp32 carries exactly."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") % ((1 << 24) - 1) + 1)


def shown_hash(pair: Hash) -> str:
    """16 hexadecimal digits."""
    return "".join(f"{half & 0xFFFFFFFF:08x}" for half in reversed(pair))


def rng_hashes() -> dict[str, Hash]:
    """States of the generators that a training draws from; two equal hashes mean the same next numbers.

    Reading a device's state may synchronise with it: for before the training, not for every step.
    """
    kind, numbers, *position = np.random.get_state(legacy=True)
    return {
        "python": hash_text(repr(random.getstate())),
        "numpy": hash_bytes(np.asarray(numbers).tobytes() + repr((kind, *position)).encode()),
        "torch": hash_bytes(torch.get_rng_state().numpy().tobytes()),
        "device": hash_bytes(generator_state().numpy().tobytes()),
    }


def _flat(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """One-dimensional view in the order of memory, and that order of the dimensions (channels_last is another)."""
    order: tuple[int, ...] = tuple(range(tensor.ndim))
    if not tensor.is_contiguous():
        by_stride = tuple(sorted(order, key=tensor.stride, reverse=True))
        if tensor.permute(by_stride).is_contiguous():
            order, tensor = by_stride, tensor.permute(by_stride)
    return tensor.reshape(-1), order


def _words(flat: Tensor) -> Iterator[Tensor]:
    """The bits as int32 words, block by block; the last bytes are filled up with zeros."""
    rows = ROWS if flat.device.type == "cpu" else DEVICE_ROWS
    per_block = KEYS * rows * 4 // flat.element_size()
    aligned = flat.storage_offset() * flat.element_size() % 4 == 0
    for begin in range(0, flat.numel(), per_block):
        block = flat[begin : begin + per_block]
        missing = -(block.numel() * block.element_size()) % 4
        if missing:
            yield torch.cat((block.view(torch.uint8), block.new_zeros(missing).view(torch.uint8)[:missing])).view(
                torch.int32
            )
        else:
            yield (block if aligned else block.clone()).view(torch.int32)


@lru_cache(maxsize=8)
def _keys(device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 (KEYS,) odd keys with distinct lower halves, and (DEVICE_ROWS + 1,) powers of the odd row multiplier."""
    powers = [signed(pow(GOLDEN, exponent, 1 << 64)) for exponent in range(DEVICE_ROWS + 1)]
    return keys_of(KEYS, first=0).to(device), torch.tensor(powers, dtype=torch.int64, device=device)


def _joined(pair: Hash) -> int:
    return signed((pair[1] & _MASK) << 32 | (pair[0] & _MASK))
