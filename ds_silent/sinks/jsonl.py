"""``metrics.jsonl`` and ``events.jsonl``: the records that everything else can be made from again; ``trace.jsonl``.

    sink = JsonlSink("runs/my-run")
    values = read_metrics("runs/my-run/metrics.jsonl")        # dictionaries, sorted, one per step, torn lines skipped
    records = list(read_records("runs/my-run/metrics.jsonl")) # the same, each a StepRecord
    events = list(read_event_records("runs/my-run/events.jsonl"))
    matrices = list(read_matrices("runs/my-run/matrices.jsonl"))     # of the steps at which it is drawn
    scores = list(read_scores("runs/my-run/scores.jsonl"))           # what the detectors saw at each step

A file is only ever appended to. A run that resumes at step s writes the steps after s again: the readers keep what was
written last. ``layers.jsonl`` (with ``direction.per_layer``), ``matrices.jsonl`` and ``scores.jsonl`` come with their
first line. Where the ranks are many a line says less of each (:mod:`ds_silent.sinks.files`), and every rank's values go
to ``per_rank.bin`` (:mod:`ds_silent.sinks.per_rank`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ds_silent.json_form import FORMAT, from_json, lines_of, newer_version, to_json
from ds_silent.records import CosineMatrix, Event, Scores, StepRecord
from ds_silent.sinks.base import logger
from ds_silent.sinks.files import FileSink, LineFile, is_drawn, make_directory, written_event, written_record
from ds_silent.trace import NAME, Head, Step, write_head, write_step


class JsonlSink(FileSink):
    """Appends one line per record and per event to the files of ``output_dir``; SinkError where it cannot."""

    def __init__(self, output_dir: str | Path) -> None:
        super().__init__(output_dir)
        make_directory(self._directory)
        self._files = {name: LineFile(self._directory / name) for name in ("metrics.jsonl", "events.jsonl")}
        self._matrices = 0

    def write(self, record: StepRecord) -> None:
        self._write("metrics.jsonl", to_json(written_record(record)))
        if record.layers:
            self._write("layers.jsonl", {"step": record.step, "layers": to_json(record.layers)})
        if record.cosine_matrix is not None:
            self._matrices += 1
            if is_drawn(self._matrices):
                matrix = CosineMatrix(record.step, record.direction.method, record.cosine_matrix)
                self._write("matrices.jsonl", to_json(matrix))

    def write_scores(self, scores: Scores) -> None:
        if scores.scores:
            self._write("scores.jsonl", to_json(scores))

    def write_event(self, event: Event) -> None:
        self._write("events.jsonl", to_json(written_event(event)))

    def _write(self, name: str, value: Any) -> None:
        self._append(name, json.dumps(value, allow_nan=False, ensure_ascii=False))


class TraceSink(FileSink):
    """Appends a line of ``trace.jsonl`` for each traced step, when the next measured one tells what was used of it.

    What is put on the disk is complete but for that: a line written early is written again, which retires it.
    """

    def __init__(self, output_dir: str | Path) -> None:
        super().__init__(output_dir)
        self._head: Head | None = None  # that was written
        self._waiting: Step | None = None
        self._early = False  # it was written all the same

    def write(self, record: StepRecord) -> None:
        traced = record.traced
        if traced is None:
            return
        if self._waiting is not None:
            known = traced.used is not None and traced.of == self._waiting.step
            if known or not self._early:
                self._write(replace(self._waiting, applied=traced.used if known else None))
        self._waiting, self._early = traced.step, False

    def _write(self, step: Step) -> None:
        if step.head is not None and step.head is not self._head:
            self._head = step.head
            self._append(NAME, write_head(step.head))
        self._append(NAME, write_step(step))

    def _write_early(self) -> None:
        if self._waiting is not None and not self._early:
            self._early = True
            self._write(self._waiting)

    def flush(self) -> None:
        self._write_early()
        super().flush()

    def close(self) -> None:
        try:
            self._write_early()
        finally:
            super().close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a ``metrics.jsonl`` (or another file of one line per step), one per step, by step.

    A record of step s retires every record of step ≥ s that was written before it: it comes from a run that resumed,
    or started again, and what lay ahead of it then never happened to the weights that exist now. Lines that are not
    a record, or of a newer version, are skipped, and a warning says how many.

    Raises:
        OSError: the file cannot be read.
    """
    kept: dict[int, dict[str, Any]] = {}
    last = -1
    for record in _objects(Path(path), ("step",)):
        if record["step"] <= last:
            kept = {step: value for step, value in kept.items() if step < record["step"]}
        last = record["step"]
        kept[last] = record
    return list(kept.values())


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of an ``events.jsonl``, by step, in the order of writing within a step.

    The same event (step, kind, ranks, place) written again by a resumed run counts once, as it was written last.
    Raises OSError where the file cannot be read.
    """
    identity = ("step", "kind", "ranks", "ranks_total", "where")
    events = _objects(Path(path), ("step", "kind"))
    kept = {json.dumps([event.get(key) for key in identity]): event for event in events}
    return sorted(kept.values(), key=lambda event: int(event["step"]))


def read_records(path: str | Path) -> Iterator[StepRecord]:
    """Yield the records of a ``metrics.jsonl`` as :func:`read_metrics` chooses them; without what only the sinks draw.

    Of lines of an older or a newer version what this one knows, see :func:`ds_silent.records.from_json`.
    """
    return _as(StepRecord, read_metrics(path), path)


def read_event_records(path: str | Path) -> Iterator[Event]:
    """Yield the events of an ``events.jsonl`` as :func:`read_events` chooses them."""
    return _as(Event, read_events(path), path)


def read_matrices(path: str | Path) -> Iterator[CosineMatrix]:
    """Yield the matrices of a ``matrices.jsonl``, by step; without what a resumed run has retired."""
    return _as(CosineMatrix, read_metrics(path), path)


def read_scores(path: str | Path) -> Iterator[Scores]:
    """Yield what the detectors saw, from a ``scores.jsonl``, by step."""
    return _as(Scores, read_metrics(path), path)


R = TypeVar("R")


def _as(kind: type[R], objects: Iterable[dict[str, Any]], path: str | Path) -> Iterator[R]:
    """Yield those that are such a record; count the others."""
    broken = 0
    for value in objects:
        try:
            yield from_json(kind, value)
        except ValueError:
            broken += 1
    if broken:
        logger.warning("ds_silent: %s: %d lines are no %s, skipped", ascii(os.fspath(path)), broken, kind.__name__)


def newer_lines(version: int, count: int) -> str:
    """Return the sentence about lines that only a newer version reads."""
    lines, are, them = ("line", "is", "it") if count == 1 else ("lines", "are", "them")
    return (
        f"{count} {lines} of version {version} {are} skipped, because this ds_silent reads version {FORMAT}; install a "
        f"newer ds_silent to read {them}"
    )


LONGEST_LINE = 1 << 24
"""Bytes; what is longer is none of ours, and is not taken into memory."""


def parsed_line(line: bytes, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the object of a line; None where it is none, or lacks one of ``keys``, or its step is no whole number."""
    try:
        value = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(value, dict) and all(key in value for key in keys) and type(value["step"]) is int
    return value if is_ours else None


def _objects(path: Path, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield every line that is an object with ``keys`` and a whole number as its step; count the others."""
    broken, newer = 0, Counter[int]()
    for _, line in lines_of(path, LONGEST_LINE):
        value = parsed_line(line, keys)
        if value is None:
            broken += 1
        elif version := newer_version(value):
            newer[version] += 1
        else:
            yield value
    for version, count in sorted(newer.items()):
        logger.warning("ds_silent: %s: %s", ascii(os.fspath(path)), newer_lines(version, count))
    if broken:
        logger.warning("ds_silent: %s: %d torn or foreign lines skipped", ascii(os.fspath(path)), broken)
