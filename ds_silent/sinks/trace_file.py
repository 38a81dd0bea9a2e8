"""Write ``trace.jsonl``; the file comes with its first line.

sink = TraceSink("runs/my-run")
sink.write(record)              # of each measured step: its ``traced``
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ds_silent.records import StepRecord
from ds_silent.sinks.base import Sink
from ds_silent.sinks.files import LineFile
from ds_silent.trace import NAME, Head, Step, write_head, write_step


class TraceSink(Sink):
    """Append a line for each traced step, as soon as the next measured one tells what the optimizer used of it.

    What is put on the disk is complete but for that: a line written early is written again, which retires it.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self._path = Path(output_dir) / NAME
        self._file: LineFile | None = None
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
        if self._file is None:
            self._file = LineFile(self._path)
        if step.head is not None and step.head is not self._head:
            self._head = step.head
            self._file.append(write_head(step.head))
        self._file.append(write_step(step))

    def _write_early(self) -> None:
        if self._waiting is not None and not self._early:
            self._early = True
            self._write(self._waiting)

    def flush(self) -> None:
        self._write_early()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        try:
            self._write_early()
        finally:
            if self._file is not None:
                self._file.close()
