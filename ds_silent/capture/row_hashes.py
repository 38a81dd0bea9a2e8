"""Make ids of rows from their content, where the script gives none.

tensors, mask = batch_tensors(args, kwargs)        # of the model's forward
ids = row_hashes(tensors, mask)

Rows that the data set really holds twice count as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_silent.maths.mixing import GOLDEN, mixed, signed

_HASH_BLOCK = 1 << 20  # elements hashed at once: bounds the int64 temporaries to a few times 8 MB


def batch_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], Tensor | None]:
    """The tensors among a model's inputs, in a fixed order, and the one named ``attention_mask``.

    Looks into lists, tuples and dicts. Dicts are read in the order of their keys' names.
    """
    tensors: list[Tensor] = []
    masks: list[Tensor] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            (masks if name == "attention_mask" and not masks and value.ndim == 2 else tensors).append(value)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                walk(value[key], str(key))
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item, name)

    walk(args, "")
    walk(kwargs, "")
    return tensors, masks[0] if masks else None


def rows_of(tensors: Sequence[Tensor]) -> int:
    """Return the rows of a micro-batch: the first dimension of its first matrix, else of its first vector; 0 without.

    Vectors may be something else, such as the offsets of the sequences that a row packs (``cu_seq_lens``).
    """
    ordered = [*(one for one in tensors if one.ndim > 1), *(one for one in tensors if one.ndim == 1)]
    return int(ordered[0].shape[0]) if ordered else 0


def row_hashes(tensors: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
    """An id of each row of a micro-batch from its content: the same bits at the same places give the same id.

    Integer arithmetic on the tensors' device; no host synchronisation, no collective. Each element is mixed with its
    place and the sum taken, h = sum_j mix(bits_j + mix(place_j)) mod 2^64, so that two rows with other content have
    the same id with probability 2^-64.

    Args:
        tensors: of any dtype (floats by their bits). Rows are the first dimension; what has another number of rows
            than :func:`rows_of` (shared position ids, offsets of packed sequences, scalars) is left out.
        mask: (rows, length), non-zero where a token is. Masked places of tensors of that length do not count, so that a
            row has one id however far it was padded, left or right. Without a mask, padding is content.

    Returns:
        int64 (rows,).

    Raises:
        ValueError: no tensor with rows.
    """
    given = [tensor.detach() for tensor in tensors if tensor.ndim > 0]
    if not given:
        raise ValueError("row_hashes needs a tensor with a dimension of rows, got none; pass the micro-batch's inputs")
    rows = rows_of(given)
    present = mask.detach() != 0 if mask is not None and mask.ndim == 2 and mask.shape[0] == rows else None
    total = torch.zeros(rows, dtype=torch.int64, device=given[0].device)
    for index, tensor in enumerate(tensor for tensor in given if tensor.shape[0] == rows):
        if present is not None and tensor.ndim >= 2 and tensor.shape[1] == present.shape[1]:
            inner = math.prod(tensor.shape[2:])
            offset = torch.arange(inner, device=tensor.device)
            numbers = present.to(torch.int64).cumsum(1) - 1
            place = (numbers[:, :, None] * inner + offset).reshape(rows, -1)
            counts = present[:, :, None].expand(-1, -1, inner).reshape(rows, -1)
        else:
            place = torch.arange(math.prod(tensor.shape[1:]), device=tensor.device)[None]
            counts = None
        bits = _bits(tensor)
        repeats = bits.shape[1] // max(place.shape[1], 1)  # complex numbers have two words
        salt = signed((index + 1) * GOLDEN)
        columns = max(1, _HASH_BLOCK // max(rows, 1))
        for begin in range(0, place.shape[1], columns):
            part = slice(begin, begin + columns)
            for word in range(repeats):
                key = mixed(place[:, part] * repeats + word + salt)
                value = mixed(bits[:, word::repeats][:, part].to(torch.int64) + key)
                total += (value if counts is None else value * counts[:, part]).sum(1)
    return total


def _bits(tensor: Tensor) -> Tensor:
    """(rows, elements) integers of the same bits; complex numbers give two each."""
    flat = tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(flat.shape[0], -1)
    if not flat.is_floating_point():
        return flat
    return flat.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
