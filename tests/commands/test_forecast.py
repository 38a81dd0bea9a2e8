"""What `ds-silent check` says of the responses: what they keep, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.commands.forecast import forecast_lines
from ds_silent.config import parse
from ds_silent.exchange.observation import FIELDS
from ds_silent.exchange.rows import DECIDE
from ds_silent.text import size_text


def told(block: dict[str, Any], parameters: int | None = None) -> str:
    config = parse({"silent_consistency": block})
    assert config is not None
    return "\n".join(forecast_lines(config, {"silent_consistency": block}, 8, parameters))


def test_a_sum_is_checked_as_a_sum() -> None:
    config = parse({"silent_consistency": {}})
    assert config is not None
    summed = "\n".join(forecast_lines(config, {"gradient_allreduce_op": "sum"}, 8, None))
    assert "aggregated gradient against the sum of the ranks'" in summed
    assert "aggregated gradient against the mean of the ranks'" in told({})


def test_retry_says_how_much_it_keeps() -> None:
    text = told({"respond": {"on_aggregation_error": "retry", "retries": 5}}, 1 << 28)
    assert "keeps a copy of the local gradient (1 GiB in fp32)" in text
    assert "up to 5 times" in text
    assert "until there is something to repair" in text
    half = {"bf16": {"enabled": True}, "silent_consistency": {"respond": {"on_aggregation_error": "retry"}}}
    config = parse(half)
    assert config is not None
    assert "(512 MiB in bf16)" in "\n".join(forecast_lines(config, half, 8, 1 << 28))
    ordered = told({"respond": {"on_aggregation_error": "retry"}, "reduction": "ordered"}, 1 << 28)
    assert "keeps no copy of its own" in ordered


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"respond": {"on_aggregation_error": "stop"}}, "before a wrong reduction is applied"),
        ({"respond": {"on_replica_drift": "majority"}}, "more than half of the ranks hold"),
        ({"respond": {"on_replica_drift": "mean"}}, "tensors that differ get the mean"),
        ({"respond": {"on_replica_drift": "stop"}}, "when replicas differ"),
        ({"resync": {"mode": "periodic", "interval": 7}}, "every 7 updates, what differs is averaged"),
        ({"resync": {"mode": "dynamic", "state": "parameters"}}, "(weights only)"),
    ],
)
def test_every_response_is_said(block: dict[str, Any], words: str) -> None:
    assert words in told(block)
    assert words not in told({})


@pytest.mark.parametrize(
    ("stage", "block", "words"),
    [
        (1, {"respond": {"on_replica_drift": "majority"}}, "ZeRO stage 1 has one owner per shard"),
        (2, {"resync": {"mode": "periodic"}}, 'resync.mode "periodic" needs a full replica'),
        (3, {"respond": {"on_replica_drift": "stop"}}, "ZeRO stage 3 has none"),
        (2, {"respond": {"on_aggregation_error": "retry"}}, "ZeRO stage 2 reduces and frees every micro-batch"),
    ],
)
def test_a_response_that_makes_no_sense_is_refused(
    stage: int, block: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "silent_consistency": block}))
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_two_ranks_cannot_vote(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"silent_consistency": {"respond": {"on_replica_drift": "majority"}}}))
    assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 0
    result = CliRunner().invoke(app, ["check", str(path), "--world-size", "2"])
    assert result.exit_code == 2
    assert "at least 3 ranks to outvote one, got 2" in result.stderr


@pytest.mark.parametrize(
    ("direction", "said"),
    [
        ({"method": "exact"}, 'direction.method "exact" needs at most 1024 ranks, got 16384: the matrix of all pairs '),
        ({"exact_interval": 50}, "direction.exact_interval 50 needs at most 1024 ranks, got 16384: the matrix of all "),
        ({"method": "off", "exact_interval": 50}, None),
        ({}, None),
    ],
)
def test_all_pairs_of_very_many_ranks_are_refused(tmp_path: Path, direction: dict[str, Any], said: str | None) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"silent_consistency": {"direction": direction}}))
    for ranks in (1024, 16_384):
        result = CliRunner().invoke(app, ["check", str(path), "--world-size", str(ranks)])
        refused = said is not None and ranks > 1024
        assert result.exit_code == (2 if refused else 0)
        if said is not None and refused:
            assert said in result.stderr
            assert "1,074 MB that every rank reduces" in result.stderr


@pytest.mark.parametrize(
    ("ranks", "stage", "ids", "sampled"),
    [  # fp32 numbers: 3 per row and a count; above, what the sample has room for
        (8, 2, 3 * 8 + 1, None),
        (1024, 0, 3 * 8 + 1, None),
        (16_384, 2, 3 + 2 * 4, "ids of one row in 16 travel too, in 44 B from each rank"),
    ],
)
def test_what_is_gathered_is_counted(ranks: int, stage: int, ids: int, sampled: str | None) -> None:
    """The named numbers of a step, the ids, and a checksum of the replica in four; per layer a norm, and a checksum."""
    ds_config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage}}
    config = parse({"silent_consistency": {}})
    assert config is not None
    text = "\n".join(forecast_lines(config, ds_config, ranks, None))
    scalars = 4 * (len(FIELDS) + ids + 4)
    if ranks > 256:  # likewise, and three bits of each rank's; the rows go to the writing rank
        summed, compared = 2 * 16384 + 2048 + 2 * 4096 + ranks // 8, len(DECIDE) + 4
        assert f"two all-reduces of {size_text(4 * summed)} and {8 * compared} B" in text
        assert f"one all-gather of {scalars + 4 * 18} B from each rank in blocks of 128" in text
    elif ranks > 64:  # two sketches, an eighth of one, layers' of 4,096 numbers twice; sixteen of a direction, two late
        assert f"one all-reduce of 168 KiB and one all-gather of {scalars + 4 * 18} B from each rank" in text
    else:
        assert f"one all-gather of {(2 * 65536 + scalars) / 1024:.1f} KiB from each rank" in text
    assert f"{4 + 16 * (stage == 0)} B more for each layer of the model" in text
    assert (sampled or "row ids travel too, 12 B each") in text


def test_the_trace_says_how_long_a_line_is() -> None:
    assert "trace       each measured step is a line of trace.jsonl, of up to 47.36 KiB" in told({"trace": {}})
    assert "each 10. measured step" in told({"trace": {"interval": 10}})
    assert "trace" not in told({})
    sizes = [re.findall(r"one all-gather of ([\d.]+) KiB", told(block)) for block in ({"trace": {}}, {})]
    [[traced], [plain]] = sizes
    assert float(traced) == pytest.approx(float(plain) + 16.0, abs=0.11)  # of sampled weights; both are rounded
