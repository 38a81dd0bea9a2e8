"""What benchmarks/nodes.py reckons by itself; the nodes need root and are ``make nodes``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import nodes
import pytest


def test_what_is_missing_is_one_sentence_with_a_remedy() -> None:
    def none_of(missing: str) -> Any:
        return lambda name: None if name == missing else f"/bin/{name}"

    nodes.refuse_without(none_of("nothing"), 0, "linux")
    for missing, user, platform, said in (
        ("tc", 0, "linux", "install the package iproute2"),
        ("unshare", 0, "linux", "install the package util-linux"),
        ("nothing", 1000, "linux", "root"),
        ("nothing", 0, "darwin", "Linux machine"),
    ):
        with pytest.raises(nodes.Missing, match=said) as told:
            nodes.refuse_without(none_of(missing), user, platform)
        assert "\n" not in str(told.value)


def test_only_namespaces_of_runs_that_are_gone_are_removed() -> None:
    mine = [node.namespace for node in nodes.nodes_of("17")]
    others = ["ds-silent-18-0", "ds-silent-x-0", "ds-silent", "cni-17-0", "ds-silent-17-0-copy"]
    assert nodes.stale_namespaces([*mine, *others], alive=lambda pid: pid == 18) == mine


def run_bpf(bytecode: str, word: int) -> int:
    """What the four instructions of a classic BPF program return for a random ``word``."""
    _, *lines = bytecode.split(",")
    program = [tuple(map(int, line.split())) for line in lines]
    place, accumulator = 0, 0
    while True:
        code, if_true, if_false, k = program[place]
        place += 1
        if code == 0x20:  # ld [k]
            assert k == 0xFFFFF000 + 56
            accumulator = word
        elif code == 0x25:  # jgt
            place += if_true if accumulator > k else if_false
        else:
            assert code == 0x06  # ret
            return k


@pytest.mark.parametrize("percent", [0.0, 5.0, 50.0])
def test_the_program_drops_that_share_of_all_words(percent: float) -> None:
    words = [round(n * 0xFFFFFFFF / 10_000) + 1 for n in range(10_000)]
    dropped = sum(run_bpf(nodes.drop_bytecode(percent), min(word, 0xFFFFFFFF)) == 2 for word in words)
    assert dropped == pytest.approx(percent * 100, abs=1)


def test_a_rank_is_known_by_its_environment() -> None:
    assert nodes.rank_of(b"PATH=/bin\0LOCAL_RANK=1\0RANK=3\0") == 3
    assert nodes.rank_of(b"PATH=/bin\0LOCAL_RANK=1\0") is None
    assert nodes.rank_of(b"") is None


def test_the_newest_whole_record_counts(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert nodes.last_step(metrics) == 0
    metrics.write_text('{"step": 4}\n{"step": 5}\n{"ste')
    assert nodes.last_step(metrics) == 5


def test_records_are_compared_by_the_last_of_each_step_and_without_the_clock() -> None:
    def record(step: int, loss: float, seconds: float) -> dict[str, Any]:
        return {"step": step, "loss": {"mean": loss}, "seconds": {"step": seconds}}

    straight = [record(1, 2.0, 0.1), record(2, 1.5, 0.1), record(3, 1.0, 0.1)]
    resumed = [record(1, 2.0, 0.2), record(2, 9.0, 0.2), record(2, 1.5, 0.3), record(3, 1.0, 0.2)]
    assert nodes.unlike(straight, resumed) == []
    assert nodes.unlike(straight, [*resumed, record(3, 1.0000001, 0.1)]) == [3]
    assert nodes.unlike(straight, resumed[:-1]) == [3]


def test_what_is_wrong_with_records_is_said(tmp_path: Path) -> None:
    assert nodes.unreadable(tmp_path) == "no record was written"
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 4)))
    assert nodes.unreadable(tmp_path) == ""
    assert nodes.steps_missing(tmp_path, 4) == "steps [3] have no record"
    assert nodes.alarms(tmp_path) == ""
    told = [
        {"step": 2, "kind": "drift", "severity": "info"},
        {"step": 3, "kind": "outlier-rank", "severity": "warning"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    assert nodes.alarms(tmp_path) == "events of a healthy training: outlier-rank at step 3"


def test_the_table_says_what_was_not_good() -> None:
    rows = [nodes.Outcome("healthy", True, "9 s", "-", "24 records"), nodes.Outcome("cut", False, "-", "x", "y", "why")]
    table = nodes.table_of(rows)
    assert list(table.columns[1].cells) == ["yes", "NO"]
    assert list(table.columns[-1].cells) == ["", "why"]


def test_without_root_the_command_ends_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert nodes.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
