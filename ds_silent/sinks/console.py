"""One line every n measured steps, beside a progress bar, and every event.

[ds_silent] step 12  loss 2.31 ± 0.18 (range 0.52)  |g| 1.02 ± 0.16 (cv 0.16)  cos 0.041 [-0.010, 0.090]  B_noise 310

The last line says what there is to know at the end, and the command that shows it.

On a terminal an event is coloured by its severity, unless NO_COLOR is set (no-color.org), and a long one is wrapped at
words; elsewhere nothing but text is written, and an event is one line, which a search finds whole.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Protocol, TextIO

from tqdm import tqdm

from ds_silent.distributed.parts import ranks_of
from ds_silent.records import Event, Scores, Severity, StepRecord
from ds_silent.text import one_line

_COLOURS: Mapping[Severity, str] = {"error": "\x1b[1;31m", "warning": "\x1b[33m", "info": "\x1b[36m"}
_PLAIN = "\x1b[0m"
LONGEST_LINE = 200
"""Characters of an event up to which a terminal breaks its line itself; a longer one is hard to find one's way in."""
_NARROWEST = 40  # columns: in a terminal of fewer every word would be a line


class Summary(Protocol):
    """What is said of a run when it ends: :class:`ds_silent.runs.summary.RunSummary`."""

    @property
    def anything(self) -> bool:
        """Whether there is something to say."""

    def write(self, record: StepRecord) -> None:
        """Count a measured step."""

    def write_event(self, event: Event) -> None:
        """Take up an event."""

    def line(self, directory: str | None) -> str:
        """Of the records in this directory; None where nothing was written."""


class ConsoleSink:
    """Prints through ``tqdm.write``, which steps around a progress bar and is a plain print where there is none.

    The first measured record is always printed, so that a new user sees at once that it works; then each ``every``-th.

    Args:
        every: measured records per line; 0: events only.
        label: which engine of the process the lines are about.
        summary: of the run, for a line at the end; None: no line.

    Attributes:
        directory: of the records, for the line at the end; None while nothing is written.
    """

    def __init__(self, every: int = 10, label: str | None = None, summary: Summary | None = None) -> None:
        if every < 0:
            raise ValueError(f"every must be at least 0, got {every}")
        self._every = every
        self._name = "[ds_silent]" if label is None else f"[ds_silent {label}]"
        self._summary, self._written = summary, 0
        self.directory: str | None = None

    def write(self, record: StepRecord) -> None:
        self._written += 1
        if self._summary is not None:
            self._summary.write(record)
        if self._every and (self._written == 1 or self._written % self._every == 0):
            _print(self._named(step_line(record)))

    def write_scores(self, scores: Scores) -> None:
        """They are in scores.jsonl."""

    def write_event(self, event: Event) -> None:
        if self._summary is not None:
            self._summary.write_event(event)
        line = self._named(event_line(event))
        if is_terminal(sys.stdout):
            line = wrapped(line, shutil.get_terminal_size().columns, indent=len(self._name) + 1)
        _print(coloured(line, event) if shows_colour(sys.stdout, os.environ) else line)

    def _named(self, line: str) -> str:
        return line.replace("[ds_silent]", self._name, 1)

    def flush(self) -> None:
        sys.stdout.flush()

    def close(self) -> None:
        summary, self._summary = self._summary, None
        if summary is not None and summary.anything:
            _print(f"{self._name} {one_line(summary.line(self.directory))}")
        self.flush()


def step_line(record: StepRecord) -> str:
    """The numbers of one step on one line; what was not measured is not mentioned."""
    loss, norm, direction = record.loss, record.grad_norm, record.direction
    parts = [f"[ds_silent] step {record.step}"]
    if loss.mean is not None:
        parts.append(f"loss {_number(loss.mean)} ± {_number(loss.std)} (range {_number(loss.range)})")
    if norm.mean is not None:
        parts.append(f"|g| {_number(norm.mean)} ± {_number(norm.std)} (cv {_number(norm.cv)})")
    if direction.mean_cosine is not None:
        bounds = ""
        if direction.min_cosine is not None and direction.max_cosine is not None:
            bounds = f" [{direction.min_cosine:.3f}, {direction.max_cosine:.3f}]"
        parts.append(f"cos {direction.mean_cosine:.3f}{bounds}")
    if record.noise_scale is not None:
        parts.append(f"B_noise {_number(record.noise_scale)}")
    return "  ".join(parts)


def event_line(event: Event) -> str:
    """One event on one line: severity, kind, who, what, and what to do."""
    parts = [f"[ds_silent] step {event.step}  {event.severity.upper()}  {event.kind}"]
    if event.ranks:
        parts.append(ranks_of(event.ranks))
    if event.where:
        parts.append(f"at {event.where}")
    return one_line(f"{'  '.join(parts)}: {event.message} {event.remedy}".rstrip())


def coloured(line: str, event: Event) -> str:
    """An :func:`event_line` with its severity and kind in colour; the sentence stays as readable as it was."""
    said = f"{event.severity.upper()}  {one_line(event.kind)}"
    return line.replace(said, f"{_COLOURS[event.severity]}{said}{_PLAIN}", 1)


def wrapped(line: str, columns: int, indent: int) -> str:
    """A line of more than :data:`LONGEST_LINE` characters, broken at words; paths and names stay whole.

    Args:
        columns: of the terminal.
        indent: columns by which every line but the first is moved in.
    """
    if len(line) <= LONGEST_LINE:
        return line
    return textwrap.fill(
        line,
        max(columns, _NARROWEST),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody looks at it."""
    return bool(getattr(stream, "isatty", lambda: False)())


def shows_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether ``stream`` is a terminal that takes colours from a user who wants them."""
    wanted = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return wanted and is_terminal(stream)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"


def _print(line: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = line.encode(encoding, errors="replace").decode(encoding)  # an ASCII terminal is no reason to stop
    tqdm.write(f"{text}\n", end="")  # in one write: the training's own thread may print at the same time
