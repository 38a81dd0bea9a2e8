"""The trainings of ``benchmarks/parting.py``: real ranks, the trace that a user gets, and what is said of a fault."""

from __future__ import annotations

from pathlib import Path

import parting
import pytest
import typer
from rich.console import Console

from ds_silent.comparison import compare


def test_a_fault_in_a_real_training_is_found_and_a_healthy_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parting, "HEALTHY", {"2 ranks for 4": {"ranks": 2}})
    monkeypatch.setattr(parting, "CONSOLE", Console(width=160))
    with pytest.raises(typer.Exit) as ended:
        parting.main(seeds=1, healthy=1, steps=5, first=3, fault=["sign", "rate"], keep=tmp_path)
    said = capsys.readouterr().out
    assert ended.value.exit_code == 0, said
    assert said.count("1 of 1") == 8
    assert "0 of 1" in said
    found = compare(tmp_path / "a3", tmp_path / "sign3")
    assert (found.link, found.layer) == ("local", parting.LAYER)
    assert found.left_out == ()
    head = (tmp_path / "a3" / "trace.jsonl").read_text().splitlines()[0]
    assert '"autocast":{"value":"off"' in head


def test_a_wrong_answer_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {name: parting.Job(str(tmp_path / name), 1, 4) for name in ("a1", "rate1")}
    for job in jobs.values():
        (tmp_path / Path(job.output).name).mkdir()
    trainings = {"parted": False, "step": None, "layer": None, "link": None, "sentence": "They do not."}
    monkeypatch.setattr(parting.ds_silent, "compare", lambda a, b: type("Found", (), trainings))
    assert parting.faults_table({"rate": parting.FAULTS["rate"]}, jobs, range(1, 2)) == 1
