"""Ids on their way through fp32, and ids made of the rows' content."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ds_silent.capture.row_hashes import batch_tensors, row_hashes
from ds_silent.exchange.row_ids import ROW_NUMBERS, all_rows, hash_rows, pack_ids, unpack_ids
from tests.support.distributed import run_distributed

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), 2**22, 2**22 - 1, 2**44, 2**44 - 1, -(2**22), 0x123456789ABCDEF]


# -- ids on their way ------------------------------------------------------------------------------------------------


def test_64_bits_survive_fp32() -> None:
    ids = torch.tensor(EXTREMES)
    packed = pack_ids(ids, 16)
    assert packed.dtype == torch.float32
    assert packed.shape == (49,)
    step = unpack_ids(packed[None].double())
    assert step.values.tolist() == EXTREMES
    assert step.taken.tolist() == [len(EXTREMES)]
    assert step.complete


def test_what_did_not_fit_is_seen() -> None:
    step = unpack_ids(torch.stack([pack_ids(torch.arange(5), 4), pack_ids(torch.arange(4), 4), torch.zeros(13)]))
    assert [step.values[step.owners == rank].tolist() for rank in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 3], []]
    assert step.taken.tolist() == [5, 4, 0]
    assert not step.complete


@pytest.mark.parametrize(("place", "value"), [(2, torch.nan), (2, torch.inf), (2, -1.0), (2, 2.0**23), (-1, torch.inf)])
def test_what_is_no_id_is_no_row(place: int, value: float) -> None:
    good = pack_ids(torch.arange(4), 4)
    bad = good.clone()
    bad[place] = value
    step = unpack_ids(torch.stack([bad, good]))
    assert step.taken.tolist() == [-1, 4]
    assert 0 not in step.owners
    assert not step.complete


def gather_ids() -> list[list[int]]:
    rank = dist.get_rank()
    own = pack_ids(torch.tensor(EXTREMES)[: 5 + rank] - rank, 16)
    everyone = torch.empty(dist.get_world_size() * len(own))
    dist.all_gather_into_tensor(everyone, own)
    step = unpack_ids(everyone.view(-1, len(own)))
    return [step.values[step.owners == rank].tolist() for rank in range(len(step.taken))]


def test_ids_through_a_real_collective() -> None:
    for result in run_distributed(gather_ids, 2):
        assert result == [[(id_ - rank + 2**63) % 2**64 - 2**63 for id_ in EXTREMES[: 5 + rank]] for rank in range(2)]


# -- ids from content ------------------------------------------------------------------------------------------------


def padded(rows: list[list[int]], length: int, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length, dtype=torch.int64)
    for index, row in enumerate(rows):
        begin = length - len(row) if left else 0
        ids[index, begin : begin + len(row)] = torch.tensor(row)
        mask[index, begin : begin + len(row)] = 1
    return ids, mask


def test_padding_does_not_change_a_row() -> None:
    rows = [[5, 6, 7], [7, 6, 5], [5, 6], [5, 6, 7, 0], [0, 5, 6, 7]]
    variants = []
    for length, left in [(4, False), (9, False), (4, True), (30, True)]:
        ids, mask = padded(rows, length, left)
        labels = torch.where(mask == 1, ids, -100)
        variants.append(row_hashes([ids, labels], mask).tolist())
    assert all(variant == variants[0] for variant in variants)
    assert len(set(variants[0])) == len(rows)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    ids = torch.randint(0, 50, (6, 12), generator=torch.Generator().manual_seed(3))
    whole = row_hashes([ids])
    assert torch.equal(row_hashes([ids[2:5]]), whole[2:5])
    assert torch.equal(row_hashes([ids.flip(0)]), whole.flip(0))
    assert len(set(whole.tolist())) == 6


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.uint8]
)
def test_every_element_and_its_place_count(dtype: torch.dtype) -> None:
    row = (torch.arange(8) % 2).to(dtype)
    rows = row.repeat(9, 1)
    for index in range(8):
        rows[index + 1, index] = (row[index] == 0).to(dtype)
    assert len(set(row_hashes([rows.view(9, 2, 4)]).tolist())) == 9
    if dtype == torch.complex64:  # real and imaginary parts are not the same place
        both = torch.tensor([[1 + 2j], [2 + 1j]])
        assert len(set(row_hashes([both]).tolist())) == 2


def test_which_tensor_holds_what_counts() -> None:
    a, b = torch.tensor([[1, 2]]), torch.tensor([[3, 4]])
    assert row_hashes([a, b]).tolist() != row_hashes([b, a]).tolist()
    assert row_hashes([a, torch.tensor(5.0)]).tolist() == row_hashes([a]).tolist()


def test_large_rows_are_hashed_in_blocks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    images, mask = torch.randn(3, 10, 7), torch.ones(3, 10)
    whole = row_hashes([images, images[:, :, 0]], mask)
    monkeypatch.setattr("ds_silent.capture.row_hashes._HASH_BLOCK", 12)
    assert torch.equal(row_hashes([images, images[:, :, 0]], mask), whole)


def test_tensors_are_found_in_a_fixed_order() -> None:
    a, b, mask = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3)
    tensors, found = batch_tensors((), {"labels": b, "attention_mask": mask, "input_ids": a})
    assert found is mask
    assert tensors[0] is a
    assert tensors[1] is b
    assert batch_tensors(([a, {"attention_mask": mask}], 3, None), {})[1] is mask
    with pytest.raises(ValueError, match="dimension of rows"):
        row_hashes([torch.tensor(1.0)])


# -- all rows in one number --------------------------------------------------------------------------------------------


def together(*ranks: list[list[int]], told: bool = True) -> tuple[int, str, bool] | None:
    device = torch.device("cpu")
    return all_rows(torch.stack([hash_rows([torch.tensor(one) for one in own], told, device) for own in ranks]))


def test_rows_have_one_hash_whoever_has_which_in_whatever_order() -> None:
    ids = torch.randint(-(2**63), 2**63 - 1, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = together([ids])
    assert whole is not None
    assert (whole[0], len(whole[1]), whole[2]) == (24, 16, True)
    assert together([ids[:8], ids[8:]], [], [[]]) == whole
    assert together([ids[5:1:-1]], [ids[12:], ids[6:12]], [ids[:2]]) == whole
    other = together([[ids[0] ^ 1, *ids[1:]]])
    twice = together([[*ids, ids[0]]])
    assert other is not None
    assert twice is not None
    assert other[1] != whole[1]
    assert (twice[0], twice[1] != whole[1]) == (25, True)


def test_the_hash_is_not_known_where_ranks_know_rows_by_different_things_or_have_none() -> None:
    device = torch.device("cpu")
    by_id, by_content = (hash_rows([torch.tensor([1, 2])], told, device) for told in (True, False))
    assert all_rows(torch.stack([by_id, by_content])) is None
    assert all_rows(torch.zeros(3, ROW_NUMBERS)) is None
    assert all_rows(torch.zeros(3, 0)) is None
    assert all_rows(torch.stack([by_id, torch.full((ROW_NUMBERS,), float("nan"))])) is None
    content = all_rows(torch.stack([by_content, torch.zeros(ROW_NUMBERS)]))
    assert content is not None
    assert content[2] is False
