"""Bit hashes: equal for equal bits, different for what memory and buses do to them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_silent.maths.fingerprint import DEVICE_ROWS, KEYS, ROWS, _keys, hash_text, rng_hashes, shown_hash, tensor_hash

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


def values_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor_hash(tensor).tolist())


def some(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def oracle(tensor: Tensor) -> int:
    """The definition with Python's integers: one word after the other, modulo 2^64."""
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    low, high = hash_text(f"{tensor.dtype} {tuple(tensor.shape)} {tuple(range(tensor.ndim))}")
    total = (high % 2**32) << 32 | low % 2**32
    keys = [int(key) for key in _keys(torch.device("cpu"))[0]]
    for begin in range(0, len(words), KEYS):
        row = sum(word * key for word, key in zip(words[begin : begin + KEYS], keys, strict=False))
        total = (total * 0x9E3779B97F4A7C15 + row) % 2**64
    return total ^ total >> 32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 50, KEYS + 5])
def test_the_hash_is_its_definition(dtype: torch.dtype, count: int) -> None:
    tensor = some((count,), dtype)
    low, high = values_of(tensor)
    assert (high % 2**32) << 32 | low % 2**32 == oracle(tensor)


def test_rows_and_blocks_are_chained_as_defined() -> None:
    tensor = torch.randn(KEYS * (ROWS + 2) + 77, generator=torch.Generator().manual_seed(1))
    low, high = values_of(tensor)
    assert (high % 2**32) << 32 | low % 2**32 == oracle(tensor)


def test_the_hash_does_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(KEYS * 9 + 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = values_of(tensor)
    monkeypatch.setattr("ds_silent.maths.fingerprint.ROWS", DEVICE_ROWS)
    assert values_of(tensor) == whole


def test_the_keys_are_what_the_guarantees_need() -> None:
    keys, powers = _keys(torch.device("cpu"))
    assert bool((keys & 1).all())
    assert len(torch.unique(keys & (2**32 - 1))) == KEYS
    assert bool((powers & 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_every_single_bit_flip_changes_it(dtype: torch.dtype) -> None:
    tensor = some((97,), dtype)
    seen = {values_of(tensor)}
    data = tensor.view(torch.uint8)
    for byte in range(0, len(data), 3):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert values_of(tensor) not in seen
            seen.add(values_of(tensor))
            data[byte] ^= 1 << bit
    assert values_of(tensor) in seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_every_swap_of_two_elements_changes_it(dtype: torch.dtype) -> None:
    tensor = some((60,), dtype)
    tensor[1::2] = -tensor[::2]  # pairs that differ in the sign bit alone, the worst case of the sum
    original = values_of(tensor)
    for i in range(60):
        for j in range(i):
            swapped = tensor.clone()
            swapped[[i, j]] = tensor[[j, i]]
            assert (values_of(swapped) == original) == torch.equal(swapped, tensor)


def test_swaps_across_rows_and_blocks_change_it() -> None:
    tensor = torch.arange(KEYS * ROWS * 2, dtype=torch.float32)
    original = values_of(tensor)
    for i, j in [(0, KEYS), (5, KEYS * ROWS + 5), (KEYS - 1, KEYS), (3, len(tensor) - 1)]:
        swapped = tensor.clone()
        swapped[[i, j]] = tensor[[j, i]]
        assert values_of(swapped) != original
    blocks = tensor.view(2, -1).flip(0).reshape(-1)
    assert values_of(blocks) != original


def test_nan_payloads_and_signed_zeros_are_bits() -> None:
    assert values_of(torch.tensor([0.0])) != values_of(torch.tensor([-0.0]))
    payloads = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert values_of(payloads[:1]) != values_of(payloads[1:])
    assert values_of(payloads[:1]) == values_of(payloads[:1].clone())


def test_shape_and_dtype_belong_to_it() -> None:
    flat = torch.zeros(12)
    hashes = {values_of(t) for t in (flat, flat.view(3, 4), flat.view(4, 3), flat.int(), torch.zeros(13), flat[:0])}
    assert len(hashes) == 6


def test_where_a_tensor_lies_does_not() -> None:
    base = some((101,), torch.bfloat16)
    assert values_of(base[1:]) == values_of(base[1:].clone())  # at an odd offset, not aligned to a word
    columns = some((30, 40), torch.float32)[:, ::3]
    assert values_of(columns) == values_of(columns.contiguous())
    image = some((2, 3, 8, 8), torch.float32).to(memory_format=torch.channels_last)
    assert values_of(image) == values_of(image.clone(memory_format=torch.preserve_format))


def test_memory_is_bounded_and_nothing_is_changed() -> None:
    tensor = torch.randn(8_000_000)
    before = tensor.clone()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tensor_hash(tensor)
    largest = max((event.self_cpu_memory_usage for event in profile.events()), default=0)
    assert 0 < largest <= 2**20
    assert torch.equal(tensor, before)


def test_text() -> None:
    assert hash_text("a") == hash_text("a") != hash_text("b")
    assert all(-(2**31) <= half < 2**31 for half in hash_text("é\ud800"))
    assert shown_hash((-1, 0)) == "00000000ffffffff"


def test_reading_generators_draws_nothing_and_sees_each() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    first = rng_hashes()
    assert first == rng_hashes()
    draws = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1)}
    for name, draw in draws.items():
        before = rng_hashes()
        draw()
        assert {key for key, value in rng_hashes().items() if value != before[key]} >= {name}
