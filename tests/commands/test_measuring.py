"""How a command that measures for a while ends: well, by a mistake of the user, or because a process broke."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from ds_silent.commands.measuring import Heard, carried_out
from ds_silent.config import ConfigError
from ds_silent.practice.ranks import RankBroke


def run(measure: Callable[[Heard], int], path: Path | str | None = None) -> int:
    def show(result: int, console: Console) -> None:
        console.print(f"measured {result}")

    name = None if path is None else str(path)
    return carried_out(measure, show, lambda result: {"result": result}, lambda result: 0 if result == 3 else 1, name)


def counting(heard: Heard) -> int:
    heard("a part [bold]")
    return 3


def test_a_result_is_shown_written_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(counting, tmp_path / "out.json") == 0
    assert capsys.readouterr() == ("measured 3\n", "")
    assert json.loads((tmp_path / "out.json").read_text()) == {"result": 3}
    assert run(lambda heard: 4) == 1


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (ConfigError("--ranks must be 3"), 2, "ds-silent: --ranks must be 3\n"),
        (RankBroke("rank 1 ended"), 1, "ds-silent: a process broke, so nothing can be said: rank 1 ended\n"),
    ],
)
def test_a_mistake_is_one_sentence(
    error: Exception, status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(heard: Heard) -> int:
        raise error

    assert run(fail) == status
    assert capsys.readouterr() == ("", sentence)


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    assert run(lambda heard: asked.append(1) or 3, tmp_path / "nowhere" / "out.json") == 2
    assert not asked
    assert "cannot be written" in capsys.readouterr().err


def test_a_full_disk_is_one_sentence_behind_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("no /dev/full here")
    assert run(counting, "/dev/full") == 2
    said = capsys.readouterr()
    assert said.out == "measured 3\n"
    assert said.err.startswith("ds-silent: the output cannot be written (No space left on device)")
