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
import json
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_silent.sinks.files import make_directory, refused

FILES = ("metrics.jsonl", "events.jsonl", "layers.jsonl")
_CHUNK = 1 << 16
_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


class Claim:
    """A directory that this process alone writes to, until :meth:`release` or until nobody keeps the claim.

    Attributes:
        directory: where.
        number: 1 for the directory that was named, n for ``run-n`` below it.
    """

    def __init__(self, directory: Path, number: int, lock: int) -> None:
        self.directory, self.number = directory, number
        self._lock = lock
        self._release = weakref.finalize(self, _unlock, lock)

    def release(self) -> None:
        """Let others write here."""
        self._release()

    def close_inherited(self) -> None:
        """In a forked child: the lock is the parent's, and must end with the parent."""
        if self._release.detach() is not None:
            os.close(self._lock)


def run_directory(base: Path, number: int) -> Path:
    """Of the ``number``-th run below ``base``, from 1."""
    return base if number == 1 else base / f"run-{number}"


def runs_of(base: Path) -> list[int]:
    """The numbers of the runs that have left records below ``base``, ascending."""
    numbers = {1}
    try:
        numbers |= {
            int(found[1]) for path in base.iterdir() if (found := re.fullmatch(r"run-([1-9]\d{0,8})", path.name))
        }
    except OSError:
        return []
    return [number for number in sorted(numbers) if is_used(run_directory(base, number))]


def is_used(directory: Path) -> bool:
    """Whether a run has left records there."""
    return any(_size(directory / name) for name in FILES)


def claim_unused(base: Path, *, first_only: bool = False) -> Claim | None:
    """The first directory of ``base``, ``base/run-2``, ``base/run-3`` ... in which nothing stands and nobody writes.

    Args:
        first_only: ``base`` itself or nothing.

    Raises:
        SinkError: it cannot be written.
    """
    for number in (1,) if first_only else itertools.count(1):
        claim = _claim(base, number, unused=True)
        if claim is not None:
            return claim
    return None


def claim_used(base: Path, number: int) -> Claim | None:
    """The ``number``-th run's directory, to go on there; None while another process writes to it.

    Raises:
        SinkError: it cannot be written.
    """
    return _claim(base, number, unused=False)


def _claim(base: Path, number: int, *, unused: bool) -> Claim | None:
    directory = run_directory(base, number)
    make_directory(directory)
    path = directory / FILES[0]
    try:
        lock, created = _open(path)
    except OSError as error:
        raise refused(path, error) from None
    locked = _try_lock(lock)
    free = locked is not False and (not unused or created or (locked is True and not is_used(directory)))
    if not free or not os.fstat(lock).st_nlink:  # an engine that never stepped has just taken its empty files away
        os.close(lock)
        return None
    if not _claims:
        _close_in_children()
    claim = Claim(directory, number, lock)
    _claims.add(claim)
    return claim


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether this call has created the file."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
    except FileExistsError:
        return os.open(path, flags | os.O_CREAT, 0o644), False


def _try_lock(descriptor: int) -> bool | None:
    """True: locked; False: somebody else has; None: this file system has no locks."""
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


_children: list[bool] = []


def _close_in_children() -> None:
    """A worker that outlives a killed training must not keep its directory locked."""
    if not _children:
        _children.append(True)
        os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    for claim in tuple(_claims):
        claim.close_inherited()


def identity(directory: Path) -> str | None:
    """What a checkpoint remembers of its records: a hash of their first line, which holds two measured times.

    It moves with a directory that is renamed or copied; None where no step has been recorded yet.
    """
    try:
        with open(directory / FILES[0], "rb") as file:
            line = file.readline()
    except OSError:
        return None
    return hashlib.sha256(line).hexdigest()[:16] if line.endswith(b"\n") else None


def holds_step(directory: Path, step: int, samples: int, interval: int) -> bool:
    """Whether a training that has done ``step`` steps with ``samples`` samples may be the one recorded there.

    Args:
        interval: steps between records.
    """
    for record in _records_backwards(directory / FILES[0]):
        if record["step"] == step:
            return bool(record["samples"] == samples)
        if record["step"] < step:
            return bool(step - record["step"] < interval and record["samples"] < samples)
    return step < interval  # no record was due yet


def _records_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """The last written first: after a resume, that is the one that counts."""
    for line in _lines_backwards(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and all(type(record.get(key)) is int for key in ("step", "samples")):
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
