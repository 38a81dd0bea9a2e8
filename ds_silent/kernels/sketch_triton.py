"""One read of a gradient as a Triton kernel: its part of the sketch, and whatever else the same read can give.

The sketch is that of :mod:`ds_silent.maths.sketch`, sign by sign, so ranks with and without this kernel can be
compared. Two things make it one read. The signs shift by ``SHIFT`` = 8 columns from row to row, so they pack into
bits: the eight signs of octet q of row r are byte q + r of :func:`packed`, and eight rows of one octet are eight
neighbouring bytes, one 64-bit word. And a program owns some columns of one table, goes down the rows of everything
that is added there, in order, and writes once: no atomics, the same bits in every run.

What a launch reads is a list of segments, each a contiguous tensor that lies at [begin, end) of the long vector:

* one tensor, with or without ``previous``, what has been accumulated so far: the sum is rounded to its dtype;
* many (``MANY``), whose addresses stand in ``addresses``: small ones share a launch.

The launch itself, and what programs there are, is :mod:`ds_silent.kernels.launches`.

Measured on an H200 (``benchmarks/bandwidth.py``): 1.7 TB/s of bf16, 3 TB/s of fp32, where a copy moves 4.2 TB/s. The
kernel waits for its loads: three splits are faster than two and than more, whose programs no longer all run at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_silent.maths.sketch import SHIFT

ROWS = 8  # of a tile: as many as one 64-bit word has signs for; tiles are shared out to programs
STEP_ROWS = {4: 4, 2: 8}  # by the bytes of an element: rows loaded at once, 128 bytes a thread; 4 with checksum
OCTETS = 64  # of a tile: 512 columns
SPLITS = 3  # programs that share a table's columns, each with a table of its own; more programs hide more latency
WARPS = 2  # 8 elements a thread: a 16-byte load per row of 16-bit elements
REGISTERS = 160  # a thread may have: without a bound the assembler may spill for the sake of more warps


def packed(signs: Tensor, width: int) -> Tensor:
    """int64 words, on the signs' device: bit 8 i + j of word q is set where the sign of element 8 (q + i) + j is -1.

    Args:
        signs: of a plan, fp32 (T + SHIFT * rows,).
        width: T.
    """
    negative = (signs.cpu() < 0).view(-1, SHIFT).to(torch.int64)
    octets = (negative << torch.arange(SHIFT)).sum(1)
    rows = -(-(len(signs) - width) // SHIFT // ROWS) * ROWS  # tiles begin at multiples of ROWS and may reach over
    padded = torch.nn.functional.pad(octets, (0, width // SHIFT + rows + OCTETS + ROWS - len(octets)))
    words = torch.zeros(len(padded) - ROWS, dtype=torch.int64)
    for i in range(ROWS):
        words |= padded[i : len(words) + i] << (8 * i)
    return words.to(signs.device)


@triton.jit
def read(
    values,  # the tensor; with MANY any of them, for its dtype
    previous,  # with PREVIOUS: as long as values
    addresses,  # with MANY: int64 (segments,)
    segments,  # int64 (segments, 3): begin and end in the long vector, row of the slots
    programs,  # int32 (programs, 4): table * SPLITS + split, block of columns, first and last entry of `order`
    order,  # int32: segments of each program, one after the other
    words,  # of packed()
    tables,  # fp32 (tables * SPLITS, length), added to
    squares,  # fp32 (slots, SPLITS, blocks): sum of squares
    checks,  # int64, the same shape: of the bits, as ds_silent.kernels.checksums
    keys,  # int64: of the pairs of words in a row, then of the rows
    weight,  # fp32, of what is added to the tables
    length,
    WIDTH: tl.constexpr,  # T
    SHIFTS: tl.constexpr,
    WORDS_ROW: tl.constexpr,  # 64-bit words of a row of the checksum
    PAIR: tl.constexpr,  # the key of a pair's second word is that of the first times this
    ROWS: tl.constexpr,  # of a tile
    STEP: tl.constexpr,  # rows that are loaded at once
    OCTETS: tl.constexpr,
    SPLITS: tl.constexpr,
    MANY: tl.constexpr,
    PREVIOUS: tl.constexpr,
    ALIGNED: tl.constexpr,  # addresses, begins and ends are multiples of 16 bytes and of 8 elements
    SKETCH: tl.constexpr,
    SQUARE: tl.constexpr,
    CHECK: tl.constexpr,  # needs ALIGNED
):
    BLOCKS: tl.constexpr = (WIDTH + OCTETS * 8 - 1) // (OCTETS * 8)
    TILE: tl.constexpr = ROWS * WIDTH
    ITEM: tl.constexpr = values.dtype.element_ty.primitive_bitwidth
    GROUP: tl.constexpr = 128 // ITEM
    GROUPS: tl.constexpr = OCTETS * 8 // GROUP
    program = tl.program_id(0)
    row_of_tables = tl.load(programs + program * 4)
    block = tl.load(programs + program * 4 + 1)
    first = tl.load(programs + program * 4 + 2)
    last = tl.load(programs + program * 4 + 3)
    split = row_of_tables % SPLITS

    # rows, groups of 16 bytes, elements of a group: a thread loads a group at once and keeps it, whatever the dtype
    row = tl.arange(0, STEP)[:, None, None]
    start_of_group = (block * OCTETS * 8) + tl.arange(0, GROUPS)[None, :, None] * GROUP
    column = start_of_group + tl.arange(0, GROUP)[None, None, :]
    within = row * WIDTH + column  # of these rows
    shift = (row * 8 + tl.arange(0, GROUP)[None, None, :]).to(tl.int64)
    total = tl.zeros((GROUPS, GROUP), tl.float32)

    for entry in range(first, last):
        segment = tl.load(order + entry)
        begin = tl.load(segments + segment * 3)
        end = tl.load(segments + segment * 3 + 1)
        slot = tl.load(segments + segment * 3 + 2)
        if ALIGNED:
            begin = tl.multiple_of(begin, 8)
            end = tl.multiple_of(end, 8)
        source = values
        if MANY:
            address = tl.load(addresses + segment)
            source = address.to(values.dtype, bitcast=True)
            if ALIGNED:
                source = tl.multiple_of(source, 16)
        square = tl.zeros((GROUPS, GROUP), tl.float32)
        check = tl.zeros((GROUPS, 1), tl.int64)

        top = begin // TILE
        count = (end + TILE - 1) // TILE - top
        start = count * split // SPLITS
        for step in range((count * (split + 1) // SPLITS - start).to(tl.int32) * (ROWS // STEP)):
            at = (top + start) * ROWS + step * STEP
            base = at * WIDTH
            low = tl.minimum(tl.maximum(begin - base, 0), STEP * WIDTH).to(tl.int32)
            high = tl.minimum(tl.maximum(end - base, 0), STEP * WIDTH).to(tl.int32)
            offset = base - begin
            if ALIGNED:
                low = tl.multiple_of(low, 8)
                high = tl.multiple_of(high, 8)
                offset = tl.multiple_of(offset, 8)
            inside = (within >= low) & (within < high) & (column < WIDTH)
            held = tl.load(source + offset + within, mask=inside, other=0)
            if SKETCH or SQUARE:
                x = held.to(tl.float32)
                if PREVIOUS:
                    before = tl.load(previous + offset + within, mask=inside, other=0)
                    x += before.to(tl.float32)
                    if before.dtype == tl.bfloat16:
                        # To nearest, ties to even, in integers: the same on every device, and NaN stays NaN.
                        bits = x.to(tl.int32, bitcast=True)
                        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
                        x = tl.where(x == x, near.to(tl.float32, bitcast=True), x)
                    elif before.dtype == tl.float16:
                        x = x.to(tl.float16).to(tl.float32)
            if SKETCH:
                word = tl.load(words + (at % SHIFTS).to(tl.int32) + start_of_group // 8)
                if GROUP < 8:
                    word = word >> (start_of_group % 8).to(tl.int64)
                flip = ((word >> shift) & 1).to(tl.int32) << 31
                signed = (x.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)
                total += weight * tl.sum(signed, axis=0)
            if SQUARE:
                square += tl.sum(x * x, axis=0)
            if CHECK:
                here = row * WIDTH + start_of_group
                present = (here >= low) & (here < high) & (start_of_group < WIDTH)
                pair = (offset + here) // GROUP
                key = tl.load(keys + WORDS_ROW // 2 + pair // (WORDS_ROW // 2), mask=present, other=0)
                key *= tl.load(keys + pair % (WORDS_ROW // 2), mask=present, other=0)
                if ITEM == 16:
                    bits = held.to(tl.uint16, bitcast=True).to(tl.int64)
                else:
                    bits = held.to(tl.uint32, bitcast=True).to(tl.int64)
                bits = bits << (tl.arange(0, GROUP) * ITEM % 64).to(tl.int64)[None, None, :]
                second = tl.arange(0, GROUP)[None, None, :] >= GROUP // 2
                bits = tl.where(second, bits * PAIR, bits)
                check += tl.sum(tl.sum(bits, axis=2, keep_dims=True) * key, axis=0)

        result = (slot * SPLITS + split) * BLOCKS + block
        if SQUARE:
            tl.store(squares + result, tl.sum(square))
        if CHECK:
            tl.store(checks + result, tl.sum(check))

    if SKETCH:
        place = block * OCTETS * 8 + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        own = tables + row_of_tables.to(tl.int64) * length + place
        tl.store(own, tl.load(own, mask=place < WIDTH) + total, mask=place < WIDTH)
