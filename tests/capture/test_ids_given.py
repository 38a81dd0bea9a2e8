"""Ids of rows as people have them, and what is no id."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.capture.batch_rows import RowIds
from ds_silent.capture.row_hashes import as_ids, batch_tensors, row_hashes, rows_of
from ds_silent.exchange.row_ids import unpack_ids
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed
from tests.support.training import LENGTH, ROWS, VOCABULARY, Case, build

SMALL = [3, 0, 7]
LARGE = [2**63 - 1, -(2**63), 5]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (SMALL, SMALL),
        (LARGE, LARGE),
        (tuple(LARGE), LARGE),
        (range(3), [0, 1, 2]),
        ([], []),
        ([np.int32(4), 5], [4, 5]),
        ([torch.tensor(4), torch.tensor(5)], [4, 5]),
        ([torch.tensor(4), 5], [4, 5]),
        (7, [7]),
        (np.int16(7), [7]),
        (torch.tensor(7), [7]),
        (np.array(LARGE), LARGE),
        (np.array(LARGE)[::-1], LARGE[::-1]),
        (np.array(SMALL, dtype=">i4"), SMALL),
        (np.array(SMALL).astype(object).astype(np.uint64), SMALL),
        *((np.array(SMALL, dtype=kind), SMALL) for kind in "bBhHiIlLqQ"),
        *(
            (torch.tensor(SMALL).to(kind), SMALL)
            for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        ),
        *((torch.tensor(SMALL).to(kind), SMALL) for kind in (torch.uint16, torch.uint32, torch.uint64)),
        (torch.tensor(LARGE), LARGE),
    ],
)
def test_what_people_have(given: Any, expected: list[int]) -> None:
    ids = as_ids(given)
    assert ids.dtype == torch.int64
    assert ids.tolist() == expected


def test_ids_are_not_the_scripts_own_memory() -> None:
    """What the script writes into its array afterwards is another batch."""
    array = np.arange(3)
    ids = as_ids(array)
    array += 1
    assert ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ("abc", TypeError, "got a str"),
        (["a", "b"], TypeError, "got a list of str"),
        ([1.0, 2.0], TypeError, "got a list of float"),
        (1.5, TypeError, "got an array of float64"),
        ([True, False], TypeError, "got a list of bool"),
        (True, TypeError, "got an array of bool"),
        (torch.tensor([True]), TypeError, "got bool"),
        (torch.tensor([1.0]), TypeError, "got float32"),
        (torch.tensor([1j]), TypeError, "got complex64"),
        (np.array([1.0]), TypeError, "got an array of float64"),
        (np.array(["a"]), TypeError, "got an array of <U1"),
        ({"input_ids": [1]}, TypeError, "got a dict"),
        ({1, 2}, TypeError, "got a set"),
        (None, TypeError, "got None"),
        (object(), TypeError, "got an object"),
        ([1, None], TypeError, "got a list of NoneType"),
        (iter([1, 2]), TypeError, "got a list_iterator"),
        ([torch.tensor([1, 2]), torch.tensor([1])], TypeError, "got a list of tensors"),
        ([[1, 2], [3, 4]], ValueError, "2 dimensions (2, 2)"),
        ([[1, 2], [3]], ValueError, "unequal parts"),
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, "2 dimensions (2, 3)"),
        (np.zeros((2, 1), dtype=int), ValueError, "2 dimensions (2, 1)"),
        ([2**64], ValueError, "64 bits"),
        ([2**63, -1], ValueError, "64 bits"),
        ([2**63], ValueError, "above 2^63 - 1"),
        (2**70, ValueError, "64 bits"),
        (np.array([2**63], dtype=np.uint64), ValueError, "above 2^63 - 1"),
    ],
)
def test_what_is_no_id_is_one_sentence(given: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as refused:
        as_ids(given)
    sentence = str(refused.value)
    assert sentence.startswith("observe_batch takes one integer id per row")
    assert said in sentence
    assert "pass" in sentence
    assert "\n" not in sentence


# -- ids and the micro-batches that they are of --------------------------------------------------------------------


def taken(rows: RowIds) -> list[int]:
    packed = rows.take(torch.device("cpu"))
    assert packed is not None
    step = unpack_ids(packed[None].double())
    assert step.complete
    return step.values.tolist()


BATCH = torch.arange(8).reshape(4, 2)
HASHED = row_hashes([BATCH]).tolist()


def test_ids_before_or_behind_the_forward(caplog: pytest.LogCaptureFixture) -> None:
    rows = RowIds(enabled=True, capacity=8, micro_batch=4)
    ids = as_ids([4, 5, 6, 7])
    rows.given(ids)
    rows.forward((BATCH.clone(),), {})
    rows.forward((BATCH.clone(),), {})
    assert taken(rows) == [4, 5, 6, 7, *HASHED]
    rows.forward((BATCH.clone(),), {})
    rows.given(ids)
    assert taken(rows) == [4, 5, 6, 7]
    rows.given(ids)  # no forward of the engine's
    assert taken(rows) == [4, 5, 6, 7]
    rows.forward((BATCH[:2].clone(),), {})  # a short last batch
    rows.given(ids[:2])
    assert taken(rows) == [4, 5]
    assert caplog.records == []


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("count", [0, 3, 5, 16])
def test_a_wrong_number_is_said_once_and_counts_for_nothing(
    count: int, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows = RowIds(enabled=True, capacity=4, micro_batch=4)
    with caplog.at_level(logging.WARNING, logger="ds_silent"):
        for _ in range(3):
            if not late:
                rows.given(torch.arange(count))
            rows.forward((), {"tokens": BATCH.clone()})
            if late:
                rows.given(torch.arange(count))
            assert taken(rows) == HASHED
            rows.end_step()
    assert len(caplog.records) == 1
    assert f"given {count} ids for a micro-batch of 4 rows" in caplog.records[0].getMessage()


def test_rows_that_the_forward_does_not_show_are_believed(caplog: pytest.LogCaptureFixture) -> None:
    """Pairs that a collate function puts one behind the other; rows in the second dimension."""
    rows = RowIds(enabled=True, capacity=4, micro_batch=4)
    rows.given(torch.arange(4))
    rows.forward((torch.cat((BATCH, BATCH)),), {})
    assert taken(rows) == [0, 1, 2, 3]
    rows.given(torch.arange(4))
    rows.forward((BATCH.t(),), {})
    assert taken(rows) == [0, 1, 2, 3]
    assert caplog.records == []


def listed(output_dir: str) -> tuple[list[Any], list[Any]]:
    """A user's loop that tells its rows as a list, an array and int32; once too few, once something else."""
    engine = build(Case(), Path(output_dir))
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    kinds: list[Any] = [list, np.array, lambda ids: torch.tensor(ids, dtype=torch.int32), lambda ids: ids[:-1], tuple]
    for step, kind in enumerate(kinds):
        first = (step * dist.get_world_size() + (0 if step == 2 else rank)) * ROWS  # step 3: the same rows everywhere
        observer.observe_batch(kind(list(range(first, first + ROWS))))
        with pytest.raises(TypeError, match="got a list of str"):
            observer.observe_batch(["row"] * ROWS)
        engine.backward(engine(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False))
        engine.step()
    observer.close()
    if rank:
        return [], []
    return list(read_metrics(Path(output_dir, "metrics.jsonl"))), list(read_events(Path(output_dir, "events.jsonl")))


def test_a_training_that_tells_its_rows_in_its_own_way(tmp_path: Path) -> None:
    records, events = run_distributed(listed, 2, (str(tmp_path),))[0]
    assert [record["coverage"]["duplicates"] for record in records] == [0, 0, ROWS, 0, 0]
    assert [event["kind"] for event in events if event["severity"] == "error"] == ["duplicate-data"]


def test_packed_sequences_are_told_by_their_tokens_and_not_by_their_offsets() -> None:
    """A flattened batch is one row; its offsets, the first tensor by name, are equal in batches that share nothing."""
    offsets = torch.tensor([0, 3, 6], dtype=torch.int32)
    found = []
    for tokens in (torch.arange(6)[None], torch.arange(6, 12)[None]):
        inputs = {"cu_seq_lens_q": offsets.clone(), "input_ids": tokens, "max_length_q": 3}
        assert rows_of(batch_tensors((), inputs)[0]) == 1
        rows = RowIds(enabled=True, capacity=4, micro_batch=4)
        rows.forward((), inputs)
        found.append(taken(rows))
    assert [len(one) for one in found] == [1, 1]
    assert found[0] != found[1]
    assert rows_of([torch.arange(5)]) == 5  # a vector of ids, each a row
    assert rows_of([torch.tensor(1.0)]) == 0
