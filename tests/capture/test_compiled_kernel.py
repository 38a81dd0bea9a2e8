"""The compiled functions read what torch's operations read: tables and checksums to the bit, squares up to rounding."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from ds_silent.kernels import accumulator, host, launches
from ds_silent.kernels.accumulator import Accumulator, CompiledAccumulator, new_accumulator
from ds_silent.kernels.checksums import Checksums, LayerChecksums, checksum
from ds_silent.maths.mixing import place_of
from ds_silent.maths.sketch import SHIFTS, make_plan, offsets_of

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
SIZE = 256
WIDTH = make_plan(1, SIZE).width
CPU = torch.device("cpu")
# inside a row, over its end, whole rows by fours and one by one, more than a block of them, nearly nothing
NUMELS = [100, WIDTH, 3 * WIDTH + 17, 9 * WIDTH, 1, 8200, 4 * WIDTH, 40, 21 * WIDTH + 1]
OFFSETS, TOTAL = offsets_of(NUMELS)
GROUPS = [0, 0, 1, 1, 1, 2, 2, 3, 3]
ONES = torch.ones(8)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """No library is there yet, and nothing was chosen."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv(launches.VARIABLE, raising=False)
    for cached in (host.compiled, launches._choice):
        cached.cache_clear()
    yield monkeypatch
    for cached in (host.compiled, launches._choice):
        cached.cache_clear()


def random(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)).to(dtype)


def both(by_layer: bool = True, rows_before: int = 0) -> tuple[Accumulator, CompiledAccumulator]:
    offsets = [offset + 8 * (rows_before * WIDTH // 8) for offset in OFFSETS]
    plan = make_plan(TOTAL + rows_before * WIDTH, SIZE)
    return tuple(kind(plan, offsets, NUMELS, GROUPS, by_layer) for kind in (Accumulator, CompiledAccumulator))  # type: ignore[return-value]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype | None]]:
    """What the compiled functions were asked to read."""
    calls: list[tuple[torch.dtype, torch.dtype | None]] = []
    functions = host.compiled()

    class Readers(dict[tuple[torch.dtype, torch.dtype | None], host.Read]):
        def get(self, dtypes: Any, default: Any = None) -> Any:
            calls.append(dtypes)
            return super().get(dtypes, default)

    class Counted:
        fold, readers = functions.fold, Readers(functions.readers)

    monkeypatch.setattr(accumulator, "compiled", Counted)
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("previous", [None, *DTYPES])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_a_gradient_is_read_as_by_torch(
    dtype: torch.dtype,
    previous: torch.dtype | None,
    by_layer: bool,
    weight: float,
    read: list[tuple[torch.dtype, torch.dtype | None]],
) -> None:
    for step in range(2):
        plain, ours = both(by_layer) if step == 0 else (plain, ours)  # noqa: F821
        exact = torch.zeros(4, dtype=torch.float64)
        for index, numel in enumerate(NUMELS):
            values = random(numel, dtype, index + 100 * step)
            before = None if previous is None else random(numel, previous, 50 + index)
            for each in (plain, ours):
                each.add(index, values, before, weight=weight)
            total = values if before is None else (before + values).to(previous)
            exact[GROUPS[index]] += total.double().square().sum()
        (sketches, _), (own, squares) = plain.take(), ours.take()
        assert torch.equal(sketches, own)
        torch.testing.assert_close(squares.double(), exact, rtol=3e-7, atol=0)
    assert set(read) == {(dtype, previous)}


def test_parts_and_what_is_left_out() -> None:
    plain, ours = both()
    values = random(NUMELS[8], torch.float32, 1)
    for each in (plain, ours):
        each.add(8, values[: 5 * WIDTH], square=False)
        each.add(8, values[5 * WIDTH :], start=5 * WIDTH)
        each.add(0, values[:100], sketching=False)
    (sketches, expected), (own, squares) = plain.take(), ours.take()
    assert torch.equal(sketches, own)
    assert squares.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert squares[0] > 0.0
    assert own[0].abs().max() == 0.0


def test_which_tensors_are_zero() -> None:
    """Those of zeros alone; not a part of one that is zero, and torch leaves out those that it reads in pieces."""
    plain, ours = both()
    small = [index for index, numel in enumerate(NUMELS) if numel <= WIDTH and OFFSETS[index] % WIDTH + numel <= WIDTH]
    assert len(small) >= 3 > 0 < len(NUMELS) - len(small)
    for zeros in ([], [small[1]], [small[0], 8], [small[2], 3, 8], []):
        for index, numel in enumerate(NUMELS):
            values = random(numel, torch.float32, index)
            values[: numel // 2] = 0.0
            for each in (plain, ours):
                each.add(index, values * (index not in zeros))
        for each, counted in ((ours, zeros), (plain, [index for index in zeros if index in small])):
            assert tuple(map(float, each.zeros())) == (len(counted), sum(map(place_of, counted)))
            each.take()
    ours.add(8, torch.zeros(5 * WIDTH))
    assert ours.zeros()[0] == len(NUMELS), "nothing came of any; the part does not count"
    some = [one for one in range(len(NUMELS)) if one not in (0, 3)]
    assert tuple(map(float, ours.zeros(some))) == (2, place_of(0) + place_of(3))


def test_a_tensor_that_comes_in_pieces_after_it_came_whole_is_not_zero() -> None:
    """A script's own gradients may lie apart (a transposed view) at one step and not at the next."""
    _, ours = both()
    index = max(range(len(NUMELS)), key=lambda one: NUMELS[one] if NUMELS[one] % 2 == 0 else 0)
    values = random(NUMELS[index], torch.float32, 1).view(2, -1)
    apart = values.T.contiguous().T
    assert not apart.is_contiguous()
    for one in (values, apart, values, apart):
        ours.add(index, one)
        assert ours.zeros()[0] == 0
        ours.take()


def test_only_what_was_read_is_folded() -> None:
    plain, ours = both()
    for index in (0, 8, 3):
        values = random(NUMELS[index], torch.float32, index)
        for each in (plain, ours):
            each.add(index, values)
        assert torch.equal(plain.peek(), ours.peek())
        sketches, own = plain.take()[0], ours.take()[0]
        assert torch.equal(sketches, own)
        assert (own.abs().amax(1) > 0.0).tolist() == [group == GROUPS[index] for group in range(4)]
        assert float(ours._tables.abs().max()) == 0.0


@pytest.mark.parametrize("size", [128, SIZE])
@pytest.mark.parametrize("contiguous", [True, False])
def test_parts_anywhere_in_a_table_are_folded(size: int, contiguous: bool) -> None:
    """A table is folded a block of ``size`` columns at a time, and only those that a part was added to."""
    plan, numel = make_plan(4000, size), 4000
    plain, ours = (kind(plan, [0], [numel], sketch_groups=True) for kind in (Accumulator, CompiledAccumulator))
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):  # fewer than the parts that are planned for
        start = int(torch.randint(numel, (1,), generator=generator))
        count = min(int(torch.randint(1, plan.width + 20, (1,), generator=generator)), numel - start)
        values = random(2 * count, torch.float32, start)[::2]
        values = values.contiguous() if contiguous else values
        for each in (plain, ours):
            each._slots.clear()
            each._used = 0
            each.add(0, values, start=start)
        expected, own = plain.take()[0], ours.take()[0]
        assert torch.equal(expected, own)
        assert float(ours._tables.abs().max()) == 0.0


def test_rows_beyond_the_last_shift() -> None:
    """The shifts begin anew there: the row after the last one has the first one's signs."""
    plain, ours = both(rows_before=SHIFTS - 7)
    values = random(NUMELS[3], torch.float32, 2)
    for each in (plain, ours):
        each.add(3, values)
    assert torch.equal(plain.take()[0], ours.take()[0])


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 3e38, 1e-44, -0.0])
@pytest.mark.parametrize("previous", [None, torch.bfloat16])
def test_odd_numbers_stay_odd(odd: float, previous: torch.dtype | None) -> None:
    plain, ours = both()
    values = random(NUMELS[3], torch.float32, 3)
    values[[0, 5, 8190, 9 * WIDTH - 1]] = odd
    if odd != odd:
        values.view(torch.int32)[7] = 0x7FFFFFFF  # what rounding would carry over into the sign
    before = None if previous is None else values.to(previous).index_fill_(0, torch.tensor([7]), 1.0)
    for each in (plain, ours):
        each.add(3, values, before)
    (sketches, expected), (own, squares) = plain.take(), ours.take()
    torch.testing.assert_close(sketches, own, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(squares, expected, rtol=1e-5, atol=0, equal_nan=True)


def test_what_it_does_not_know_goes_the_other_way() -> None:
    plain, ours = both()
    half, wide = random(NUMELS[5], torch.float16, 4), random(2 * NUMELS[8], torch.float32, 5)
    for each in (plain, ours):
        each.add(5, half)
        each.add(8, wide[::2])
        each.add(2, random(NUMELS[2], torch.float64, 6))
        each.add(0, random(0, torch.float32, 0))
    for right, found in zip(plain.take(), ours.take(), strict=True):
        assert torch.equal(right, found)
    negated = torch._neg_view(random(NUMELS[4], torch.float32, 3))
    for each in (plain, ours):
        each.add(4, negated)
    assert torch.equal(plain.take()[0], ours.take()[0])
    for each in (plain, ours):  # and is known again
        each.add(8, wide[: NUMELS[8]])
        each.add(8, wide[::2], weight=-1.0)
    assert torch.equal(plain.take()[0], ours.take()[0])


def test_what_has_no_address_is_not_read_there() -> None:
    """It would end the process."""
    wrapper, zero, negated = (
        TwoTensor(torch.ones(8), torch.ones(8)),
        torch._efficientzerotensor(8),
        torch._neg_view(ONES),
    )
    assert [host.address_of(one) for one in (wrapper, zero, negated, ONES[::2])] == [0, 0, 0, 0]
    assert host.address_of(ONES) == host.address_of(nn.Parameter(ONES)) == ONES.data_ptr()
    Checksums([32], CPU)([wrapper])
    assert int(Checksums([32], CPU)([negated])[0]) == int(checksum(-ONES))


@pytest.mark.long
def test_a_layers_tensors_may_be_of_several_dtypes(fresh: pytest.MonkeyPatch) -> None:
    """And come late, or with another dtype than before."""
    tensors = [random(300, torch.float32, 1), random(4000, torch.float64, 2), random(300, torch.bfloat16, 3)]
    found = []
    for kernel in ("torch", "compiled"):
        fresh.setenv(launches.VARIABLE, kernel)
        of_layers = LayerChecksums([300, 4000, 300], [0, 0, 1], CPU)
        found.append([of_layers(own).tolist() for own in ([tensors[0], None, None], tensors, [None, *tensors[1:]])])
    assert found[0] == found[1]
    assert len({*found[0][1], *found[0][2]}) == 3


@pytest.mark.long
def test_checksums_are_those_of_torch(fresh: pytest.MonkeyPatch) -> None:
    tensors: list[Tensor | None] = [random(numel, torch.float32, numel) for numel in (1, 2, 3, 16_384, 16_385, 50_001)]
    tensors += [random(40_001, torch.bfloat16, 7), random(33_000, torch.float32, 8)[1:], torch.ones(13) > 0]
    tensors += [torch.zeros(0), None, random(300, torch.float32, 9).view(20, 15).t(), torch.arange(9)]
    sizes = [20 if one is None else one.nbytes for one in tensors]
    fresh.setenv(launches.VARIABLE, "torch")
    plain = Checksums(sizes, CPU)
    fresh.setenv(launches.VARIABLE, "compiled")
    ours = Checksums(sizes, CPU)
    assert (plain._compiled, type(ours._compiled)) == (None, host.Functions)
    expected, found = plain(tensors), ours(tensors)
    assert expected.tolist() == found.tolist()
    assert found[10] == 0
    one = tensors[5]
    assert one is not None
    before = int(checksum(one))
    for place in (0, 16_383, 50_000):
        one.view(torch.int32)[place] ^= 1 << 7
        assert int(checksum(one)) != before
        one.view(torch.int32)[place] ^= 1 << 7


@pytest.mark.long
def test_it_is_chosen_where_there_is_a_compiler(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert launches.choice(CPU) == ("compiled", "a compiled function")
    offsets, total = offsets_of([100])
    assert type(new_accumulator(make_plan(total, 256), offsets, [100])) is CompiledAccumulator
    library = next((tmp_path / "ds_silent").glob("*.so"))
    made = library.stat().st_mtime_ns
    assert sorted((tmp_path / "ds_silent").iterdir()) == [library]
    host.compiled.cache_clear()
    host.compiled()
    assert library.stat().st_mtime_ns == made


@pytest.mark.parametrize("left", [0, 500, 60_000, None])
@pytest.mark.long
def test_a_library_that_is_cut_off_or_that_others_may_write_is_made_anew(
    left: int | None, fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To load one that is cut off ends the process."""
    host.compiled()
    library = next((tmp_path / "ds_silent").glob("*.so"))
    content = library.read_bytes()
    library.unlink()  # this process has it open
    library.write_bytes(content[:left])
    library.chmod(0o777 if left is None else 0o700)
    host.compiled.cache_clear()
    host.compiled()
    assert (library.read_bytes(), library.stat().st_mode & 0o777) == (content, 0o700)


def test_a_directory_that_others_may_write_to_is_not_used(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ds_silent").mkdir()
    (tmp_path / "ds_silent").chmod(0o777)
    assert launches.choice(CPU) == ("torch", f"PermissionError: others may write to {tmp_path / 'ds_silent'}"[:120])


def test_whatever_is_odd_torch_reads(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "latin"
    script.write_bytes(b"#!/bin/sh\nprintf 'h.c:1: \\351rror: \\374\\n' >&2\nexit 1\n")
    script.chmod(0o700)
    for compiler in (str(script), "gcc -DX='a"):
        fresh.setenv("CC", compiler)
        host.compiled.cache_clear()
        launches._choice.cache_clear()
        assert launches.choice(CPU).by == "torch"
    fresh.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    fresh.delenv("CC")
    fresh.delenv("TORCH_EXTENSIONS_DIR")
    fresh.delenv("XDG_CACHE_HOME", raising=False)
    host.compiled.cache_clear()
    launches._choice.cache_clear()
    assert launches.choice(CPU) == ("torch", "RuntimeError: Could not determine home directory.")


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "FileNotFoundError: [Errno 2] No such file or directory: 'no-such-compiler'"),
        ("false", "false failed: status 1"),
        ("true", "FileNotFoundError: "),  # it says that it has compiled
    ],
)
def test_without_a_compiler_torch_reads(fresh: pytest.MonkeyPatch, compiler: str, reason: str) -> None:
    fresh.setenv("CC", compiler)
    by, why = launches.choice(CPU)
    assert by == "torch"
    assert why.startswith(reason)
    launches._choice.cache_clear()
    fresh.setenv(launches.VARIABLE, "compiled")
    with pytest.raises(ValueError, match="DS_SILENT_KERNEL=compiled, but its kernel does not run here"):
        launches.choice(CPU)


def test_a_cache_that_cannot_be_written_is_no_error(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fresh.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert launches.choice(CPU).by == "torch"
    assert launches.choice(CPU).reason.startswith("NotADirectoryError")


def test_it_reads_on_no_other_device(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv(launches.VARIABLE, "compiled")
    with pytest.raises(ValueError, match="it reads no gradient on cuda"):
        launches.choice(torch.device("cuda"))
