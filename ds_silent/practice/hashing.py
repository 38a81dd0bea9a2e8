"""The one hash of a training's state: of its bits, by another function than the responses' own checksum.

hash_of(model.parameters())          # 64 hexadecimal digits; equal only where every bit is

Who judges a repair must not believe it: replicas are compared by :mod:`ds_silent.kernels.checksums`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def hash_of(values: Iterable[object]) -> str:
    """sha256 of tensors' bits, and of anything else as Python shows it, in their order."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()
