"""Above 64 ranks: a line that does not grow, and a file of every rank's values that a killed writer cannot spoil."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_silent.records import DirectionStats, GradNormStats, IntegrityStats, LossStats, StepRecord, to_json
from ds_silent.sinks import open_files
from ds_silent.sinks.files import quantiles_of, written_event
from ds_silent.sinks.jsonl import JsonlSink, read_event_records, read_metrics, read_records
from ds_silent.sinks.per_rank import MAGIC, PerRankError, PerRankSink, RanksOfStep, read_per_rank
from tests.sinks.example_records import empty_record, event, full_record

ROOT = Path(__file__).resolve().parents[2]


def wide(step: int, ranks: int, seed: int = 0) -> StepRecord:
    """Of many ranks, with numbers as long as numbers get."""
    random = np.random.default_rng([seed, step])
    losses, norms, cosines = (-random.random(ranks) * 10.0**power for power in (-30, -5, -10))
    pairs = (ranks - 2, ranks - 1), (0, ranks - 1)
    return replace(
        full_record(step, layers=(), cosine_matrix=None),
        world_size=ranks,
        loss=LossStats(-1e-300 / 3, 1e-300 / 3, 1e-300 / 7, tuple(losses.tolist())),
        grad_norm=GradNormStats("sketch", 1e-5 / 3, 1e-5 / 7, 1 / 3, 1e-5 / 3, 1e-5 / 7, tuple(norms.tolist())),
        direction=DirectionStats("sketch", -1e-99 / 3, 1e-3 / 3, -1 / 3, 1 / 3, *pairs, tuple(cosines.tolist())),
        integrity=IntegrityStats(1e-7 / 3, 1e-7 / 7, tuple((rank,) for rank in range(ranks))),
    )


@pytest.mark.parametrize("ranks", [32, 64, 65, 1024, 65_536])
def test_a_line_does_not_grow_with_the_ranks(ranks: int, tmp_path: Path) -> None:
    record, path = wide(7, ranks), tmp_path / "metrics.jsonl"
    line = line_of(record, tmp_path)
    # numbers as long as these, 64 replicas that all differ, and the objective take a little more
    assert path.stat().st_size <= (4400 + len('"objective": {}') + 80 if ranks == 64 else 4096)
    (read,) = read_records(path)
    for name in ("loss", "grad_norm", "direction"):
        values = getattr(record, name).per_rank
        written = line[name]
        if ranks <= 64:
            exactly = list(values) if ranks == 32 else pytest.approx(list(values), rel=5.1e-8)
            assert written["per_rank"] == exactly
            assert not {"quantiles", "extremes"} & set(written)
            continue
        assert written["per_rank"] is None
        ordered = sorted(values)
        assert (written["quantiles"]["min"], written["quantiles"]["max"]) == (ordered[0], ordered[-1])
        for key, share in (("q10", 0.1), ("q25", 0.25), ("median", 0.5), ("q75", 0.75), ("q90", 0.9)):
            below = sum(value < written["quantiles"][key] for value in values)
            assert abs(below / ranks - share) <= 1 / ranks
        expected = {str(values.index(value)): value for value in (*ordered[:8], *ordered[-8:])}
        assert written["extremes"] == expected
        assert list(written["extremes"]) == list(expected)  # from the lowest to the highest
        assert getattr(read, name).extremes == {int(rank): value for rank, value in expected.items()}
        assert getattr(read, name).quantiles.median == written["quantiles"]["median"]
    if ranks > 64:
        assert line["integrity"]["replica_groups"] is None
        assert line["integrity"]["replica_group_count"] == ranks
        assert line["integrity"]["replica_group_sizes"] == [1] * 8
        assert to_json(read) == line


def line_of(record: StepRecord, directory: Path) -> dict[str, Any]:
    """The record in metrics.jsonl."""
    sink = JsonlSink(directory)
    sink.write(record)
    sink.close()
    (line,) = read_metrics(directory / "metrics.jsonl")
    return line


def test_what_was_not_measured_stays_null_with_many_ranks(tmp_path: Path) -> None:
    assert line_of(empty_record(1, ranks=100), tmp_path) == to_json(empty_record(1, ranks=100))


def test_a_rank_without_a_number_is_among_the_highest_and_counted(tmp_path: Path) -> None:
    losses = [float(rank) for rank in range(100)]
    losses[17], losses[31], losses[40] = math.nan, math.inf, -math.inf
    record = full_record(1, 100, cosine_matrix=None, loss=LossStats(math.nan, per_rank=tuple(losses)))
    loss = line_of(record, tmp_path)["loss"]
    assert loss["quantiles"]["nan"] == 1
    assert (loss["quantiles"]["min"], loss["quantiles"]["median"], loss["quantiles"]["max"]) == ("-inf", 51.0, "inf")
    assert list(loss["extremes"].items())[-2:] == [("31", "inf"), ("17", "nan")]
    assert next(iter(loss["extremes"].items())) == ("40", "-inf")
    assert quantiles_of([math.nan] * 3) is None
    one = quantiles_of([2.5])
    assert one is not None
    assert {one.min, one.q10, one.median, one.max} == {2.5}


def test_an_event_about_many_ranks_says_how_many(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    few, many = event(ranks=tuple(range(64))), event(ranks=tuple(range(16_384)))
    part = replace(many, ranks=tuple(range(70)), global_ranks=tuple(range(0, 140, 2)))
    for one in (few, many, part, replace(many, ranks=many.ranks[:100])):
        sink.write_event(one)
    sink.close()
    read = list(read_event_records(tmp_path / "events.jsonl"))
    assert len(read) == 4  # the first 64 ranks of the others are alike
    assert read[0] == few
    assert (read[1].ranks, read[1].ranks_total) == (tuple(range(64)), 16_384)
    assert (read[2].global_ranks, read[2].ranks_total) == (tuple(range(0, 128, 2)), 70)
    assert len(written_event(many).ranks) == 64
    assert len(many.ranks) == 16_384


# -- per_rank.bin ------------------------------------------------------------------------------------------------------


def write(directory: Path, steps: list[int], ranks: int = 100, seed: int = 0) -> Path:
    sink = PerRankSink(directory)
    for step in steps:
        sink.write(wide(step, ranks, seed))
    sink.flush()
    sink.close()
    return directory / "per_rank.bin"


def steps_of(path: Path) -> list[int]:
    return [found.step for found in read_per_rank(path)]


def assert_as_written(found: RanksOfStep, ranks: int = 100, seed: int = 0) -> None:
    record = wide(found.step, ranks, seed)
    for values, expected in (
        (found.loss, record.loss.per_rank),
        (found.grad_norm, record.grad_norm.per_rank),
        (found.cosine, record.direction.per_rank),
    ):
        assert values is not None
        assert np.array_equal(values, np.array(expected, dtype=np.float32))


def test_every_rank_s_values_come_back(tmp_path: Path) -> None:
    files = open_files(tmp_path, tensorboard=False)
    files.write(wide(1, 65))
    files.write(replace(wide(2, 65), grad_norm=GradNormStats(), direction=DirectionStats()))
    files.write(empty_record(3, ranks=65))
    files.write(replace(wide(4, 65), loss=LossStats(per_rank=(math.nan, 1e300, -math.inf, *[0.5] * 62))))
    files.write(wide(5, 70))  # a resume with other ranks
    files.close()
    first, second, fourth, fifth = read_per_rank(tmp_path / "per_rank.bin")
    assert_as_written(first, 65)
    assert (second.grad_norm, second.cosine) == (None, None)
    assert np.array_equal(second.loss, first.loss) is False
    assert fourth.loss is not None
    assert np.isnan(fourth.loss[0])
    assert fourth.loss[1:4].tolist() == [math.inf, -math.inf, 0.5]
    assert_as_written(fifth, 70)


def test_few_ranks_have_no_such_file(tmp_path: Path) -> None:
    files = open_files(tmp_path, tensorboard=False)
    files.write(full_record(1, ranks=64, cosine_matrix=None))
    files.write(empty_record(1, ranks=65))
    files.close()
    assert not (tmp_path / "per_rank.bin").exists()


@pytest.mark.parametrize("left", [0, 5, 16, 40, 17 + 1232, 16 + 2 * 1232 - 1])
def test_a_torn_end_is_left_out_and_what_follows_is_not_lost(
    tmp_path: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, [1, 2])
    whole = path.read_bytes()
    assert len(whole) == 16 + 2 * 1232
    path.write_bytes(whole[:left])
    before = [1] if left > 16 + 1232 else []
    assert steps_of(path) == before
    write(tmp_path, [3, 4])
    caplog.clear()
    found = list(read_per_rank(path))
    assert [one.step for one in found] == [*before, 3, 4]
    for one in found:
        assert_as_written(one)
    assert ("1 torn blocks skipped" in caplog.text) == (left not in (0, 5, 16))


def test_damage_costs_the_blocks_that_it_is_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, [1, 2, 3, 4])
    data = bytearray(path.read_bytes())
    data[16 + 1232 + 500] ^= 1  # in the values of step 2
    data[16 + 2 * 1232 + 9] ^= 1  # in the head of step 3
    path.write_bytes(data)
    assert steps_of(path) == [1, 4]
    assert "torn blocks skipped" in caplog.text


def test_a_resumed_run_retires_what_lay_ahead(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3, 4, 5])
    path = write(tmp_path, [3, 4], seed=1)
    found = list(read_per_rank(path))
    assert [one.step for one in found] == [1, 2, 3, 4]
    assert_as_written(found[1])
    assert_as_written(found[2], seed=1)


@pytest.mark.parametrize("content", [b"PK\x03\x04", b'{"step": 1}\n' * 9, b"\0" * 99, MAGIC + b"\x02" + b"\0" * 7])
def test_a_foreign_file_is_refused_with_a_sentence(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "per_rank.bin"
    path.write_bytes(content)
    what = "is not of version 1" if content.startswith(MAGIC) else "is no per_rank.bin of ds_silent"
    with pytest.raises(PerRankError, match=what) as caught:
        list(read_per_rank(path))
    assert "\n" not in str(caught.value)
    files = open_files(tmp_path, tensorboard=False)
    with caplog.at_level(logging.WARNING):
        files.write(wide(1, 65))
        files.write(wide(2, 65))
    files.close()
    assert caplog.text.count("PerRankSink stops writing") == 1
    assert path.read_bytes() == content
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_killed_writer_tears_at_most_its_last_block(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.sinks.test_per_rank import wide\n"
        "from ds_silent.sinks.per_rank import PerRankSink\n"
        f"sink = PerRankSink(Path({str(tmp_path)!r}))\n"
        "records = [wide(step, 3000) for step in range(1, 5)]\n"
        "for turn in range(1, 100_000):\n"
        "    for record in records:\n"
        "        sink.write(record)\n"
        "    print(turn, flush=True)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert writer.stdout is not None
    for _ in range(3):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    found = list(read_per_rank(tmp_path / "per_rank.bin"))
    assert [one.step for one in found] in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4])
    for one in found:
        assert_as_written(one, 3000)
    assert json.dumps(to_json(wide(1, 3000)))
