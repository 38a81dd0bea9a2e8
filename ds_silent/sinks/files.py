"""Write directories and append-only files that survive ``kill -9``, a full disk and a resumed run."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ds_silent.metrics import RANK_METRICS
from ds_silent.records import Event, Quantiles, StepRecord
from ds_silent.sinks.base import Sink, SinkError

Thing = TypeVar("Thing")


def in_children(thing: Thing, act: Callable[[Thing], object]) -> None:
    """Call ``act(thing)`` in every forked child, as long as the thing lives."""
    reference = weakref.ref(thing)

    def forked() -> None:
        if (alive := reference()) is not None:
            act(alive)

    os.register_at_fork(after_in_child=forked)


def make_directory(directory: Path) -> None:
    """Create ``directory`` and prove that a file can be created in it; SinkError names the path, reason and remedy."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise refused(directory, error) from None


class AppendedFile:
    """A file that is only ever appended to; opened on creation, closed by :meth:`close`.

    What is appended is one ``write`` to an ``O_APPEND`` descriptor, so a killed process tears at most its last piece.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise refused(path, error) from None
        self._path = path

    def write(self, data: bytes) -> None:
        """Append ``data``; OSError where the disk is full, or the file is no longer in its directory."""
        while data:  # one round, unless the disk fills up in the middle
            data = data[os.write(self._fd, data) :]
        if os.fstat(self._fd).st_nlink == 0:  # a write to a deleted file succeeds, and nobody will ever read it
            raise OSError(errno.ENOENT, "the file was removed while the run was writing it", os.fspath(self._path))

    def append(self, line: str) -> None:
        """Write ``line``, which holds no newline, and its newline; raises as :meth:`write`."""
        self.write(line.encode("utf-8") + b"\n")

    def flush(self) -> None:
        """Ask the system to put what was written on the disk itself; other processes see it already."""
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class LineFile(AppendedFile):
    """Whole lines appended to a file.

    A torn line that an earlier process left is closed with a newline, so that it stays alone and a reader can skip it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")
        except OSError as error:
            os.close(self._fd)
            raise refused(path, error) from None


class FileSink(Sink):
    """Appends to files of a directory, each of which comes with what is first written to it."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._files: dict[str, AppendedFile] = {}

    def _append(self, name: str, line: str) -> None:
        """Append a line; raises as :meth:`AppendedFile.write`, and SinkError where the file cannot be opened."""
        if name not in self._files:
            self._files[name] = LineFile(self._directory / name)
        self._files[name].append(line)

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def refused(path: Path, error: OSError) -> SinkError:
    reason = error.strerror or type(error).__name__
    return SinkError(
        f"silent_consistency.output_dir: {os.fspath(path)!a} cannot be written ({reason}); "
        "choose a directory that rank 0 can create files in"
    )


# What is written of a record or an event about many ranks: as much of it as of one about few. Pure. In memory both keep
# every rank: the detectors, the callbacks and the file of raw values (``per_rank``) read them.

MOST_RANKS = 64
"""Ranks up to which all are written one by one."""
MANY = 32
"""Ranks above which their values are written with DIGITS digits: so a line of 64 ranks has less than 4 kB."""
DIGITS = 8  # fp32, in which the ranks' values travelled, has seven
EXTREME = 8
"""Ranks with the lowest values, and as many with the highest."""
SHOWN_GROUPS = 8
_PLACES = {"min": 0.0, "q10": 0.1, "q25": 0.25, "median": 0.5, "q75": 0.75, "q90": 0.9, "max": 1.0}


def written_record(record: StepRecord) -> StepRecord:
    """Return it as ``metrics.jsonl`` holds it: of a size that does not grow with the ranks."""
    if record.world_size <= MANY:
        return record
    stats = {metric.path.split(".")[0] for metric in RANK_METRICS}
    record = replace(record, **{name: _shortened(getattr(record, name), record.world_size) for name in stats})
    groups = record.integrity.replica_groups
    if record.world_size <= MOST_RANKS or groups is None:
        return record
    sizes = tuple(sorted(map(len, groups), reverse=True)[:SHOWN_GROUPS])
    integrity = replace(
        record.integrity, replica_groups=None, replica_group_count=len(groups), replica_group_sizes=sizes
    )
    return replace(record, integrity=integrity)


def written_event(event: Event) -> Event:
    """Return it as ``events.jsonl`` holds it."""
    if len(event.ranks) <= MOST_RANKS:
        return event
    whole = None if event.global_ranks is None else event.global_ranks[:MOST_RANKS]
    return replace(event, ranks=event.ranks[:MOST_RANKS], global_ranks=whole, ranks_total=len(event.ranks))


_FIRST_DRAWN, _DRAWN_EACH = (1, 2, 5, 10, 20, 50), 100


def is_drawn(number: int) -> bool:
    """Tell whether the ``number``-th N x N matrix of cosines since the process began, from 1, is drawn and kept.

    Drawing one takes 0.1 s, and a line of 64 ranks in ``matrices.jsonl`` 80 kB.
    """
    return number in _FIRST_DRAWN or number % _DRAWN_EACH == 0


def quantiles_of(values: Sequence[float] | npt.NDArray[np.float64]) -> Quantiles | None:
    """Return those of the values that are numbers, infinities among them; None where there is none."""
    ordered = np.sort(np.array(values, dtype=np.float64))
    count = int(np.searchsorted(ordered, np.nan))  # sorted behind every number
    if count == 0:
        return None
    at = {name: float(ordered[round(share * (count - 1))]) for name, share in _PLACES.items()}
    return Quantiles(**at, nan=len(ordered) - count or None)


def _shortened(stats: Any, world_size: int) -> Any:
    if stats.per_rank is None:
        return stats
    if world_size <= MOST_RANKS:
        return replace(stats, per_rank=tuple(float(f"{value:.{DIGITS}g}") for value in stats.per_rank))
    values = np.array(stats.per_rank, dtype=np.float64)
    order = np.argsort(values)  # NaN comes last: a rank without a number is among the highest
    ranks = np.concatenate((order[:EXTREME], order[-EXTREME:]))
    extremes = dict(zip(ranks.tolist(), values[ranks].tolist(), strict=True))
    return replace(stats, per_rank=None, quantiles=quantiles_of(values), extremes=extremes)
