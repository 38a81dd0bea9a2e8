"""One line every n measured steps, beside a progress bar, and every event.

[ds_silent] step 12  loss 2.31 ± 0.18 (range 0.52)  |g| 1.02 ± 0.16 (cv 0.16)  cos 0.041 [-0.010, 0.090]  B_noise 310

On a terminal an event is coloured by its severity, unless NO_COLOR is set (no-color.org), and a long one is wrapped at
words; elsewhere nothing but text is written, and an event is one line, which a search finds whole.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping

from tqdm import tqdm

from ds_silent.distributed.parts import ranks_of
from ds_silent.records import Event, Severity, StepRecord
from ds_silent.sinks.base import Sink
from ds_silent.text import one_line, printable

_COLOURS: Mapping[Severity, str] = {"error": "\x1b[1;31m", "warning": "\x1b[33m", "info": "\x1b[36m"}
_PLAIN = "\x1b[0m"
EVERY = 10  # measured steps
LONGEST_LINE = 200
"""Characters of an event up to which a terminal breaks its line itself; a longer one is hard to find one's way in."""
_NARROWEST = 40  # columns: in a terminal of fewer every word would be a line


class ConsoleSink(Sink):
    """Prints through ``tqdm.write``, which steps around a progress bar and is a plain print where there is none.

    The first measured record is printed, so that a new user sees at once that it works; then each ``EVERY``-th.
    ``label``: which engine of the process the lines are about.
    """

    def __init__(self, label: str | None = None) -> None:
        self._written = 0
        self._name = speaker(label)

    def write(self, record: StepRecord) -> None:
        self._written += 1
        if self._written == 1 or self._written % EVERY == 0:
            say(step_line(record, self._name))

    def write_event(self, event: Event) -> None:
        line, terminal = event_line(event, self._name), getattr(sys.stdout, "isatty", lambda: False)()
        if terminal:
            line = wrapped(line, shutil.get_terminal_size().columns, indent=len(self._name) + 1)
        colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        say(coloured(line, event) if colour else line)

    def flush(self) -> None:
        sys.stdout.flush()

    def close(self) -> None:
        self.flush()


def step_line(record: StepRecord, name: str = "[ds_silent]") -> str:
    """Return the numbers of one step on one line; what was not measured is not mentioned."""
    loss, norm, direction = record.loss, record.grad_norm, record.direction
    parts = [f"{name} step {record.step}"]
    if loss.mean is not None:
        parts.append(f"loss {_number(loss.mean)} ± {_number(loss.std)} (range {_number(loss.range)})")
    if norm.mean is not None:
        parts.append(f"|g| {_number(norm.mean)} ± {_number(norm.std)} (cv {_number(norm.cv)})")
    if direction.mean_cosine is not None:
        bounds = ""
        low, high = direction.min_cosine, direction.max_cosine
        if low is not None and high is not None and record.world_size > 2:  # two ranks have one cosine
            bounds = f" [{low:.3f}, {high:.3f}]"
        parts.append(f"cos {direction.mean_cosine:.3f}{bounds}")
    if record.noise_scale is not None:
        hidden = not record.noise_scale >= 0.0  # this step's noise hides the signal, or there is none
        parts.append(f"B_noise {'n/a' if hidden else _number(record.noise_scale)}")
    return "  ".join(parts)


def event_line(event: Event, name: str = "[ds_silent]") -> str:
    """Return one event on one line: severity, kind, who, what, and what to do."""
    parts = [f"{name} step {event.step}  {event.severity.upper()}  {event.kind}"]
    if event.ranks:
        parts.append(ranks_of(event.ranks))
    if event.where:
        parts.append(f"at {event.where}")
    return one_line(f"{'  '.join(parts)}: {event.message} {event.remedy}".rstrip())


def coloured(line: str, event: Event) -> str:
    """Return an :func:`event_line` with its severity and kind in colour; the sentence stays as readable as it was."""
    said = f"{event.severity.upper()}  {one_line(event.kind)}"
    return line.replace(said, f"{_COLOURS[event.severity]}{said}{_PLAIN}", 1)


def wrapped(line: str, columns: int, indent: int) -> str:
    """Return a line of more than :data:`LONGEST_LINE` characters broken at words; paths and names stay whole.

    ``columns``: of the terminal; ``indent``: by which every line but the first is moved in.
    """
    if len(line) <= LONGEST_LINE:
        return line
    width, further = max(columns, _NARROWEST), " " * indent
    return textwrap.fill(line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def speaker(label: str | None) -> str:
    """Return how a line of an engine begins."""
    return "[ds_silent]" if label is None else f"[ds_silent {label}]"


def say(line: str) -> None:
    """Print a line in one write: the training may print at the same time."""
    tqdm.write(f"{printable(line)}\n", end="")


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"
