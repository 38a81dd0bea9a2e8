"""A saved state that is damaged, or of another version, is named in one sentence, and the training goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY
from ds_silent.integrations.callback_config import go_on
from ds_silent.sinks.jsonl import read_metrics
from tests.support.ddp_training import DDPCase, build
from tests.support.distributed import run_distributed

NOT_USED = "ds_silent: the observer's state in the checkpoint is not used: "
STATES: list[tuple[Any, str, int, int]] = [  # and the sentence, the next step and the rows until it
    ({"version": 2, "counted": {"step": 5, "samples": 70}}, "", 5, 70),
    ({"counted": {"step": 5, "rows": 30}}, "", 5, 60),
    ({"counted": "lost"}, 'what it has counted must be an object, and is "lost"', 1, 0),
    ({"counted": {"samples": 70}}, '"step" of what it has counted must be an integer of at least 1, and is null', 1, 0),
    ({"counted": {"step": 0, "samples": 7}}, '"step" of what it has counted must be an integer of at least 1, and is 0',
     1, 0),
    ({"counted": {"step": "5", "samples": 70}},
     '"step" of what it has counted must be an integer of at least 1, and is "5"', 1, 0),
    ({"counted": {"step": 5, "samples": -1}},
     '"samples" of what it has counted must be an integer of at least 0, and is -1', 5, 0),
    ({"counted": {"step": 5, "samples": float("nan")}},
     '"samples" of what it has counted must be an integer of at least 0, and is NaN', 5, 0),
    ({"counted": {"step": 5}}, '"rows" of what it has counted must be an integer of at least 0, and is null', 5, 0),
    ({"version": 9, "counted": {"step": 5, "samples": 70}}, "it has version 9, this one reads 2", 5, 70),
    ({"version": "two", "samples_per_epoch": 4}, 'it has version "two", this one reads 2', 1, 0),
    ({"samples_per_epoch": "many"}, '"samples_per_epoch" must be an integer of at least 0, and is "many"', 1, 0),
    (None, "it must be an object, and is null", 1, 0),
]  # fmt: skip


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def goes_on(directory: str) -> list[tuple[list[str], list[dict[str, Any]]]]:
    found = []
    for number, (state, *_) in enumerate(STATES):
        messages, output = Messages(), Path(directory, str(number))
        model, optimizer = build(DDPCase())
        observer = ds_silent.attach(model, {"output_dir": str(output), "tensorboard": False}, optimizer=optimizer)
        assert observer is not None
        logging.getLogger("ds_silent").addHandler(messages)
        observer.load_state_dict(state)
        logging.getLogger("ds_silent").removeHandler(messages)
        generator = torch.Generator().manual_seed(dist.get_rank())
        model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
        optimizer.step()
        observer.close()
        found.append((messages.texts, list(read_metrics(output / "metrics.jsonl")) if dist.get_rank() == 0 else []))
    return found


def test_a_damaged_state_is_named_and_the_training_goes_on(tmp_path: Path) -> None:
    first, second = run_distributed(goes_on, 2, (str(tmp_path),))
    for (_, sentence, step, rows), (texts, records) in zip(STATES, first, strict=True):
        assert texts == ([NOT_USED + sentence] if sentence else [])
        assert [(one["step"], one["samples"]) for one in records] == [(step, rows + 2 * ROWS)], sentence
    assert {tuple(texts) for texts, _ in second} == {()}  # the writing rank's word is enough


def test_a_trainer_hands_on_its_own_step_beside_what_is_damaged() -> None:
    taken: list[Any] = []
    observer: Any = SimpleNamespace(load_state_dict=taken.append)
    for kept in ({}, {"counted": {"step": 3, "samples": 70}}, {"counted": "lost"}):
        go_on(observer, kept, 40, 160)
    expected: list[dict[str, int]] = [{"rows": 160, "step": 41}, {"step": 41, "samples": 70}, {"step": 41}]
    assert taken == [{"counted": one} for one in expected]
