"""Which run a directory belongs to: claimed by one process at a time, continued by a resume, and by nothing else.

    claim = claim_unused(Path("runs/my-run"))              # that directory, or run-2, run-3 ... below it
    claim = claim_used(Path("runs/my-run"), number=2)      # to go on there; None while somebody else writes
    claim.release()

A directory is used when one of its files of lines holds a byte. While a process writes, it holds a lock on
``metrics.jsonl``; where the file system has no locks, the creation of that file decides, which only one can win.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_silent.sinks.files import in_children, make_directory, refused
from ds_silent.sinks.jsonl import parsed_line

FILES = ("metrics.jsonl", "events.jsonl", "layers.jsonl")
_CHUNK = 1 << 16


class Claim:
    """A directory that this process alone writes to, until :meth:`release` or until nobody keeps the claim.

    ``number``: 1 for the directory that was named, n for ``run-n`` below it.
    """

    def __init__(self, directory: Path, number: int, lock: int) -> None:
        self.directory, self.number = directory, number
        self._lock = lock
        self._release = weakref.finalize(self, _unlock, lock)
        in_children(self, Claim.close_inherited)  # a worker that outlives a killed training must not keep the lock

    def release(self) -> None:
        """Let others write here."""
        self._release()

    def close_inherited(self) -> None:
        """In a forked child: the lock is the parent's, and must end with the parent."""
        if self._release.detach() is not None:
            os.close(self._lock)


def run_directory(base: Path, number: int) -> Path:
    """Return the directory of the ``number``-th run below ``base``, from 1."""
    return base if number == 1 else base / f"run-{number}"


def runs_of(base: Path) -> list[int]:
    """Return the numbers of the runs that have left records below ``base``, ascending."""
    try:
        names = [re.fullmatch(r"run-([1-9]\d{0,8})", path.name) for path in base.iterdir()]
    except OSError:
        return []
    numbers = {1, *(int(name[1]) for name in names if name)}
    return [number for number in sorted(numbers) if is_used(run_directory(base, number))]


def is_used(directory: Path) -> bool:
    """Return whether a run has left records there."""
    for path in (directory / name for name in FILES):
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_size:
                return True
    return False


def claim_unused(base: Path, *, first_only: bool = False) -> Claim | None:
    """Claim the first directory of ``base``, ``base/run-2`` ... in which nothing stands and nobody writes.

    ``first_only``: ``base`` itself or nothing. Raises SinkError where it cannot be written.
    """
    claims = (_claim(base, number, unused=True) for number in ((1,) if first_only else itertools.count(1)))
    return next((claim for claim in claims if claim is not None), None)


def claim_used(base: Path, number: int) -> Claim | None:
    """Claim the ``number``-th run's directory, to go on there; None while another process writes to it.

    Raises SinkError where it cannot be written.
    """
    return _claim(base, number, unused=False)


def _claim(base: Path, number: int, *, unused: bool) -> Claim | None:
    directory = run_directory(base, number)
    make_directory(directory)
    path, created = directory / FILES[0], True
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_CREAT
    try:
        try:
            lock = os.open(path, flags | os.O_EXCL, 0o644)
        except FileExistsError:
            lock, created = os.open(path, flags, 0o644), False
    except OSError as error:
        raise refused(path, error) from None
    locked = _try_lock(lock)
    free = locked is not False and (not unused or created or (locked is True and not is_used(directory)))
    if not free or not os.fstat(lock).st_nlink:  # an engine that never stepped has just taken its empty files away
        os.close(lock)
        return None
    return Claim(directory, number, lock)


def _try_lock(descriptor: int) -> bool | None:
    """Return True: locked; False: somebody else has; None: this file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # where there are no locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was started otherwise may still hold the descriptor
    os.close(descriptor)


def identity(directory: Path) -> str | None:
    """Return what a checkpoint remembers of its records: a hash of their first line, which holds two measured times.

    It moves with a directory that is renamed or copied; None where no step has been recorded yet.
    """
    try:
        with open(directory / FILES[0], "rb") as file:
            line = file.readline()
    except OSError:
        return None
    return hashlib.sha256(line).hexdigest()[:16] if line.endswith(b"\n") else None


def holds_step(directory: Path, step: int, samples: int, interval: int) -> bool:
    """Return whether a training that has done ``step`` steps with ``samples`` samples may be the one recorded there.

    ``interval``: steps between records.
    """
    for record in _records_backwards(directory / FILES[0]):
        if record["step"] == step:
            return bool(record["samples"] == samples)
        if record["step"] < step:
            return bool(step - record["step"] < interval and record["samples"] < samples)
    return step < interval  # no record was due yet


def _records_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last written first: after a resume, that is the one that counts."""
    for line in _lines_backwards(path):
        record = parsed_line(line, ("step", "samples"))
        if record is not None and type(record["samples"]) is int:
            yield record


def _lines_backwards(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        position, rest = file.seek(0, os.SEEK_END), b""
        while position:
            size = min(_CHUNK, position)
            position = file.seek(position - size)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
        yield rest
