"""Hashes of weights: those of pieces make that of the whole, and every change of a value changes it."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from ds_silent.maths.weight_hash import joined, weight_hash

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
WORD = 1 << 64


def some(*shape: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 50).to(dtype)


def oracle(tensor: Tensor) -> int:
    """The definition with Python's integers, one element after the other."""
    total = 0
    for index, value in enumerate(tensor.reshape(-1).tolist()):
        if tensor.dtype == torch.float64:
            (word,) = struct.unpack("<q", struct.pack("<d", value))
        elif tensor.dtype.is_floating_point:
            (word,) = struct.unpack("<i", struct.pack("<f", value))
        else:
            word = int(value)
        mixed = (word + 1) * 0xBF58476D1CE4E5B9 % WORD
        mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EB % WORD
        total += (mixed ^ mixed >> 32) * pow(0x9E3779B97F4A7C15, index, WORD)
    return total % WORD


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 50])
def test_the_hash_is_its_definition(dtype: torch.dtype, count: int) -> None:
    tensor = some(count, dtype=dtype)
    assert weight_hash(tensor) == oracle(tensor)


def test_blocks_are_placed_as_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = some(3, 70)
    whole = weight_hash(tensor)
    monkeypatch.setattr("ds_silent.maths.weight_hash.BLOCK", 16)
    assert weight_hash(tensor) == whole == oracle(tensor)


def test_pieces_make_the_whole() -> None:
    q, k, v = (some(rows, 24, seed=rows) for rows in (16, 8, 9))
    pieces = [(weight_hash(piece), piece.numel()) for piece in (q, k, v)]
    assert joined(*pieces) == weight_hash(torch.cat((q, k, v)))
    assert joined(pieces[1], pieces[0], pieces[2]) != joined(*pieces)


def test_the_same_values_in_a_wider_type_have_the_same_hash() -> None:
    narrow = some(40, dtype=torch.bfloat16)
    assert weight_hash(narrow) == weight_hash(narrow.float())
    assert weight_hash(narrow) != weight_hash(narrow.double())
    assert weight_hash(narrow) != weight_hash(some(40))


def test_equal_and_opposite_changes_and_swaps_are_seen() -> None:
    tensor = some(4_000, dtype=torch.bfloat16)
    usual = weight_hash(tensor)
    bits = tensor.view(torch.int16)
    for seed in range(200):
        a, b = torch.randint(0, 4_000, (2,), generator=torch.Generator().manual_seed(seed)).tolist()
        if a == b:
            continue
        moved = bits.clone()
        moved[a] += 1
        moved[b] -= 1
        assert weight_hash(moved.view(torch.bfloat16)) != usual
        swapped = tensor.clone()
        swapped[a], swapped[b] = tensor[b], tensor[a]
        assert (weight_hash(swapped) == usual) == (float(tensor[a]) == float(tensor[b]))
        signs = tensor.clone()
        signs[a], signs[b] = -signs[a], -signs[b]
        assert weight_hash(signs) != usual
