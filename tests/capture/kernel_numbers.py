"""The kernel against the sketch's formula in float64: in Triton's interpreter, on CPU tensors, or on a GPU.

``test_kernel.py`` runs this file in a process of its own: what the interpreter takes must be so before Triton is
imported, and other tests may have imported it.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from ds_silent.kernels import launches
from ds_silent.kernels.accumulator import Accumulator, FusedAccumulator, new_accumulator
from ds_silent.kernels.checksums import Checksums, checksum
from ds_silent.kernels.launches import Reader, Segment, Slots
from ds_silent.maths import sketch
from ds_silent.maths.mixing import place_of

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda")
SIZE, WIDTH = 256, 2008
ROUNDING = 3e-7  # of fp32 sums of some thousand elements, over their norm
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# begin and length in the long vector: in a row, whole rows, across rows and tiles of eight rows, not aligned at all
PLACES = [
    (0, 16),
    (8, 4096),
    (2000, 16),
    (WIDTH, 3 * WIDTH),
    (5, 1),
    (1999, 7003),
    (16, 9 * WIDTH + 24),
    (15 * WIDTH, WIDTH),
]


def random(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def oracle(plan: sketch.SketchPlan, values: Tensor, begin: int) -> Tensor:
    """(T,) float64: the columns of the definition, before they are folded."""
    place = torch.arange(begin, begin + len(values))
    row, column = place // plan.width, place % plan.width
    signed = plan.signs.cpu().double()[8 * (row % 65_536) + column] * values.cpu().double()
    return torch.zeros(plan.width, dtype=torch.float64).index_add_(0, column, signed)


def new_slots(reader: Reader, count: int) -> Slots:
    return Slots(torch.zeros(count, reader.splits * reader.blocks, device=DEVICE))


def columns_of(plan: sketch.SketchPlan, tables: Tensor) -> Tensor:
    """(T,) float64, and nothing behind them."""
    assert not tables[:, plan.width :].any()
    return tables.cpu().double().sum(0)[: plan.width]


@pytest.fixture(scope="module")
def plan() -> sketch.SketchPlan:
    return sketch.make_plan(64 * WIDTH, SIZE, DEVICE)


@pytest.fixture(scope="module")
def reader(plan: sketch.SketchPlan) -> Reader:
    return Reader(plan, keys=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("begin", "numel"), PLACES)
def test_one_read_gives_sketch_and_norm(
    plan: sketch.SketchPlan, reader: Reader, dtype: torch.dtype, begin: int, numel: int
) -> None:
    values, tables, slots = random(numel, dtype), plan.new_tables(reader.splits), new_slots(reader, 1)
    launch = reader.launch([Segment(begin, begin + numel, 0, 0)])
    for weight in (1.0, 1.0, -1.0):
        reader(launch, [values], tables, slots, weight=weight)
    norm = float(values.double().norm())
    error = columns_of(plan, tables) - oracle(plan, values, begin)
    assert float(error.norm()) <= ROUNDING * norm
    assert float(slots.squares.sum()) == pytest.approx(norm**2, rel=1e-6)


def test_signs_are_those_of_the_plan_bit_for_bit(plan: sketch.SketchPlan, reader: Reader) -> None:
    """A one in each place of two tiles, one row at a time: what arrives is the sign itself."""
    for row in (0, 1, 7, 8, 13):
        tables = plan.new_tables(reader.splits)
        launch = reader.launch([Segment(row * WIDTH, (row + 1) * WIDTH, 0, 0)])
        reader(launch, [torch.ones(WIDTH, device=DEVICE)], tables, Slots())
        assert torch.equal(tables.sum(0)[:WIDTH], plan.signs[8 * row : 8 * row + WIDTH])


def test_signs_begin_again_behind_their_last_shift() -> None:
    plan = sketch.make_plan(65_544 * WIDTH, SIZE, DEVICE)
    reader = Reader(plan)
    values, tables = random(9 * WIDTH, torch.float32), plan.new_tables(reader.splits)
    begin = 65_531 * WIDTH + 80
    reader(reader.launch([Segment(begin, begin + len(values), 0, 0)]), [values], tables, Slots())
    error = columns_of(plan, tables) - oracle(plan, values, begin)
    assert float(error.norm()) <= ROUNDING * float(values.norm())


@pytest.mark.parametrize("wrong", ["sign", "row", "element"])
def test_the_oracle_sees_one_wrong_bit_row_or_element(plan: sketch.SketchPlan, wrong: str) -> None:
    """What the comparisons above are worth: the least of mistakes is far above the rounding."""
    reader, numel = Reader(plan), 20 * WIDTH
    values, tables = random(numel, torch.float32), plan.new_tables(reader.splits)
    given, read = values.clone(), numel
    if wrong == "sign":
        reader._words[7] ^= 1 << 11
    elif wrong == "row":
        read -= WIDTH
    else:
        given[12_345] *= 1.001
    reader(reader.launch([Segment(0, read, 0, 0)]), [given], tables, Slots())
    error = columns_of(plan, tables) - oracle(plan, values, 0)
    assert float(error.norm()) > 10 * ROUNDING * float(values.norm())


@pytest.mark.parametrize("before", DTYPES)
@pytest.mark.parametrize("now", [torch.float32, torch.bfloat16])
def test_sum_with_what_was_accumulated_is_rounded_as_accumulation_does(
    plan: sketch.SketchPlan, reader: Reader, before: torch.dtype, now: torch.dtype
) -> None:
    """Element by element: a row has one element in each column, so the table holds the rounded sums themselves."""
    held, values = random(WIDTH, before, 1), random(WIDTH, now, 2)
    held[:9] = torch.tensor([1.0, 1.0, -1.0, float("inf"), float("nan"), 3e38, -3e38, 0.0, 65_000.0]).to(before)
    values[:9] = torch.tensor([2.0**-8, 3 * 2.0**-8, -(2.0**-8), 1.0, 1.0, 3e38, -3e38, 0.0, 600.0]).to(now)
    held[9], values[9] = 1e-41, 1e-41  # below the normal numbers
    right = held.clone().add_(values).float()  # what accumulation leaves
    tables = plan.new_tables(reader.splits)
    reader(reader.launch([Segment(0, WIDTH, 0, 0)]), [values], tables, Slots(), previous=held)
    found = tables.sum(0)[:WIDTH] * plan.signs[:WIDTH]
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_that_are_not_finite_reach_sketch_and_norm(
    plan: sketch.SketchPlan, reader: Reader, dtype: torch.dtype
) -> None:
    values = random(3 * WIDTH, dtype)
    places = {10: "nan", 3000: "inf", 3001: "-inf", 6000: "nan"}
    for place, what in places.items():
        values[place] = float(what)
    tables, slots = plan.new_tables(reader.splits), new_slots(reader, 1)
    reader(reader.launch([Segment(0, len(values), 0, 0)]), [values], tables, slots)
    columns = tables.sum(0)[:WIDTH]
    assert {place % WIDTH for place in places} == set(torch.where(~columns.isfinite())[0].tolist())
    assert not slots.squares.sum().isfinite()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32])
def test_checksum_of_the_same_read(plan: sketch.SketchPlan, reader: Reader, dtype: torch.dtype) -> None:
    """At any aligned place of the long vector, with and without sketch."""
    numel = 8192 * 8 // dtype.itemsize + 24  # a row of the checksum and a little more
    values = torch.arange(numel, dtype=torch.int32, device=DEVICE) if dtype == torch.int32 else random(numel, dtype)
    for begin, sketching in ((0, True), (2016, False)):
        if dtype == torch.int32 and sketching:
            continue
        slots = Slots(checks=new_slots(reader, 1).squares.to(torch.int64))
        tables = plan.new_tables(reader.splits) if sketching else None
        reader(reader.launch([Segment(begin, begin + numel, 0, 0)]), [values], tables, slots)
        assert int(slots.checks.sum()) == int(checksum(values))
        changed = values.clone()
        changed.view(torch.uint8)[12_345] ^= 4
        reader(reader.launch([Segment(begin, begin + numel, 0, 0)]), [changed], tables, slots)
        assert int(slots.checks.sum()) == int(checksum(changed)) != int(checksum(values))


def test_many_tensors_in_one_launch_are_the_sum_of_single_ones(plan: sketch.SketchPlan, reader: Reader) -> None:
    """Two tables, odd and even lengths; the same bits in every run and whatever was there before stays."""
    numels = [24, 1, 3 * WIDTH, 999, 16, 9 * WIDTH + 8]
    for dtype, only in ((torch.bfloat16, slice(None)), (torch.float32, slice(0, None, 2))):
        offsets = sketch.offsets_of(numels)[0][only]
        tensors = [random(numel, dtype, seed) for seed, numel in enumerate(numels)][only]
        segments = [
            Segment(begin, begin + len(tensor), table % 2, len(tensors) - 1 - table)
            for table, (begin, tensor) in enumerate(zip(offsets, tensors, strict=True))
        ]
        launch = reader.launch(segments)
        runs = []
        for _ in range(2):
            tables, slots = plan.new_tables(2 * reader.splits).add_(1.0), new_slots(reader, len(tensors))
            tables[:, WIDTH:] = 0.0
            reader(launch, tensors, tables, slots)
            runs.append((tables, slots.squares))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        for table in (0, 1):
            own = runs[0][0][table * reader.splits : (table + 1) * reader.splits]
            right = sum(
                oracle(plan, tensor, segment.begin)
                for tensor, segment in zip(tensors, segments, strict=True)
                if segment.table == table
            )
            error = columns_of(plan, own) - reader.splits - right
            assert float(error.norm()) <= 1e-6 * float(right.norm())
        squares = runs[0][1].sum(1).flip(0)
        assert squares.tolist() == pytest.approx([float(t.double().square().sum()) for t in tensors], rel=1e-6)


def both(numels: list[int], by_layer: bool) -> tuple[Accumulator, FusedAccumulator]:
    offsets, total = sketch.offsets_of(numels)
    plan, groups = sketch.make_plan(total, SIZE, DEVICE), [number % 3 for number in range(len(numels))]
    return Accumulator(plan, offsets, numels, groups, by_layer), FusedAccumulator(
        plan, offsets, numels, groups, by_layer
    )


@pytest.mark.parametrize("by_layer", [False, True])
def test_the_accumulator_tells_the_same_with_and_without_the_kernel(by_layer: bool) -> None:
    """Whatever comes: sums, parts, the sketch taken back, other dtypes, elements that lie apart, nothing at all."""
    numels = [5000, 7, 3 * WIDTH, 640, 4096]
    plain, fused = both(numels, by_layer)
    bf16 = torch.bfloat16
    launched: list[int] = []
    original = fused._reader.__class__.__call__

    def counted(reader: Reader, launch: object, values: list[Tensor], *args: object) -> None:
        launched.append(len(values))
        original(reader, launch, values, *args)

    fused._reader.__class__.__call__ = counted  # type: ignore[method-assign]
    try:
        for step in range(2):
            for each in (plain, fused):
                each.add(0, random(5000, bf16, step), previous=random(5000, bf16, 9))
                each.add(1, random(7, torch.float32, step))
                each.add(2, random(3 * WIDTH, torch.float64, step))  # a dtype that it does not take
                each.add(3, random(640, bf16, step).view(20, 32).T)  # not contiguous
                each.add(3, random(640, bf16, 3), weight=-1.0, square=False)
                each.add(4, random(1000, torch.float32, step), start=24)
                each.add(4, random(3072, torch.float32, step), start=1024, sketching=False)
                each.add(4, torch.empty(0, device=DEVICE), start=8)
            first, second = plain.peek(), fused.peek()
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
            (sketches, squares), (ours, our_squares) = plain.take(), fused.take()
            assert sketches.shape == ours.shape == (3 if by_layer else 1, SIZE)
            torch.testing.assert_close(sketches, ours, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(squares, our_squares, rtol=1e-6, atol=0)
            parts = [(i, 0, random(n, [torch.float32, bf16][i % 2], i)) for i, n in enumerate(numels)]
            for each in (plain, fused):
                each.add_all(iter(parts) if step else parts)
            (sketches, squares), (ours, our_squares) = plain.take(), fused.take()
            torch.testing.assert_close(sketches, ours, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(squares, our_squares, rtol=1e-6, atol=0)
            assert not any(values.any() for values in fused.take())
    finally:
        fused._reader.__class__.__call__ = original  # type: ignore[method-assign]
    assert launched == 2 * [1, 1, 1, 1, 1, 3, 2]


def test_a_launch_that_fails_leaves_the_rest_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = both([4096, 4096], by_layer=True)
    for each in (plain, fused):
        each.add(0, random(4096, torch.float32))
    monkeypatch.setattr(type(fused._reader), "__call__", lambda *args: 1 / 0)
    for each in (plain, fused):
        each.add(1, random(4096, torch.float32, 1))
    assert fused.refused == "ZeroDivisionError: division by zero"
    for right, ours in zip(plain.take(), fused.take(), strict=True):
        torch.testing.assert_close(right, ours, rtol=1e-5, atol=1e-5)


def test_the_variable_takes_the_kernel_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first launch was tried, and gave what it must."""
    monkeypatch.setenv(launches.VARIABLE, "triton")
    assert launches.choice(DEVICE) == ("triton", "Triton's kernel")
    plan = sketch.make_plan(100, SIZE, DEVICE)
    assert type(new_accumulator(plan, [0], [100])) is FusedAccumulator


def test_which_tensors_are_zero() -> None:
    """By the kernel and by torch's operations beside it, of one list; a part of a tensor is none."""
    numels = [5000, 7, 3 * WIDTH, 640, 4096]
    for zeros in ([], [2], [0, 3, 4]):
        _, fused = both(numels, False)
        values = [random(numel, torch.float32, number) * (number not in zeros) for number, numel in enumerate(numels)]
        values[3] = values[3].view(20, 32).T  # lies apart: torch reads it
        for _ in range(2):
            fused.add_all([(number, 0, one) for number, one in enumerate(values)])
            assert tuple(map(float, fused.zeros())) == (len(zeros), sum(map(place_of, zeros)))
            fused.take()
    fused.add(2, torch.zeros(WIDTH, device=DEVICE), start=WIDTH)
    assert fused.zeros()[0] == len(numels), "nothing came of any; the part does not count"


def test_checksums_of_a_list_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many in one launch, the rest one by one: odd sizes, no tensor, elements that lie apart, other dtypes."""
    tensors: list[Tensor | None] = [
        random(4096, torch.bfloat16),
        random(40_000, torch.float32),
        random(999, torch.float32),
        None,
        random(640, torch.float32).view(20, 32).T,
        torch.arange(64, device=DEVICE),
        torch.arange(64, device=DEVICE) > 30,
        random(33, torch.bfloat16)[1:],
    ]
    sizes = [0 if tensor is None else tensor.numel() * tensor.element_size() for tensor in tensors]
    monkeypatch.setenv(launches.VARIABLE, "torch")
    right = Checksums(sizes, DEVICE)(tensors)
    monkeypatch.setenv(launches.VARIABLE, "triton")
    together = Checksums(sizes, DEVICE)
    for _ in range(2):
        assert torch.equal(together(tensors), right)
    assert together._together(tensors).which == {0, 1, 5, 6}
    assert not torch.equal(together([None, *tensors[1:]]), right)
    whole = [tensors[0], tensors[1]]
    assert torch.equal(Checksums(sizes[:2], DEVICE)(whole), right[:2])
