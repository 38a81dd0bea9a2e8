"""``metrics.jsonl`` and ``events.jsonl``: the records that everything else can be made from again.

    sink = JsonlSink("runs/my-run")
    records = read_metrics("runs/my-run/metrics.jsonl")     # sorted, one per step, torn lines skipped

A file is only ever appended to. A run that resumes at step s writes the steps after s again: the readers keep what was
written last. With ``direction.per_layer`` the layers go to ``layers.jsonl``, one object per step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_silent.records import Event, StepRecord, to_json
from ds_silent.sinks.base import logger
from ds_silent.sinks.files import LineFile, make_directory


class JsonlSink:
    """Appends one line per record and per event to the files of ``output_dir``.

    Raises:
        SinkError: on creation, when the directory or its files cannot be written.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self._directory = Path(output_dir)
        make_directory(self._directory)
        self._metrics = LineFile(self._directory / "metrics.jsonl")
        self._events = LineFile(self._directory / "events.jsonl")
        self._layers: LineFile | None = None

    def write(self, record: StepRecord) -> None:
        self._metrics.append(_line(to_json(record)))
        if record.layers:
            if self._layers is None:
                self._layers = LineFile(self._directory / "layers.jsonl")
            self._layers.append(_line({"step": record.step, "layers": to_json(record.layers)}))

    def write_event(self, event: Event) -> None:
        self._events.append(_line(to_json(event)))

    def flush(self) -> None:
        for file in self._files():
            file.flush()

    def close(self) -> None:
        for file in self._files():
            file.close()

    def _files(self) -> Iterator[LineFile]:
        yield self._metrics
        yield self._events
        if self._layers is not None:
            yield self._layers


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl`` (or ``layers.jsonl``), one per step, by step.

    A record of step s retires every record of step ≥ s that was written before it: it comes from a run that resumed,
    or started again, and what lay ahead of it then never happened to the weights that exist now. Lines that are not
    a record are skipped, and a warning says how many.

    Raises:
        OSError: the file cannot be read.
    """
    kept: dict[int, dict[str, Any]] = {}
    last = -1
    for record in _objects(Path(path), ("step",)):
        step = record["step"]
        if step <= last:
            kept = {earlier: value for earlier, value in kept.items() if earlier < step}
        kept[step] = record
        last = step
    return list(kept.values())


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of an ``events.jsonl``, by step, in the order of writing within a step.

    The same event (step, kind, ranks, place) written again by a resumed run counts once, as it was written last.

    Raises:
        OSError: the file cannot be read.
    """
    kept: dict[str, dict[str, Any]] = {}
    for event in _objects(Path(path), ("step", "kind")):
        identity = json.dumps([event["step"], event["kind"], event.get("ranks"), event.get("where")])
        kept[identity] = event
    return sorted(kept.values(), key=lambda event: int(event["step"]))


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _objects(path: Path, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Every line that is an object with ``keys`` and a whole number as its step; counts the others."""
    broken = 0
    with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict) and all(key in value for key in keys) and type(value["step"]) is int:
                yield value
            else:
                broken += 1
    if broken:
        logger.warning("ds_silent: %s: %d torn or foreign lines skipped", ascii(os.fspath(path)), broken)
