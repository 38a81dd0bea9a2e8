"""Read a file of lines as it grows, also where it is truncated, replaced or not there yet.

follower = Follower(Path("runs/my-run/metrics.jsonl"), ("step",))
follower.poll().objects       # of the lines that have come since the last call
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ds_silent.sinks.jsonl import LONGEST_LINE, parsed_line

_AT_ONCE = 1 << 23
_WITNESS = 64  # bytes before the place that was reached, which must still be the same


@dataclass(frozen=True)
class News:
    """Lines that have come since the last call."""

    objects: list[dict[str, Any]]
    restarted: bool = False  # what was read before is gone: begin anew with these
    broken: int = 0  # lines that are not such objects
    more: bool = False  # there is more already: poll again


class Follower:
    """Reads one file, at most 8 MiB of whole lines a call; a torn last line waits for its end.

    ``problem``: why the file cannot be read, in a few words; None where it can, or is not there.
    """

    def __init__(self, path: Path, keys: tuple[str, ...]):
        self._path, self._keys = path, keys
        self._place, self._file = 0, (0, 0)
        self._witness = b""
        self._skipping = False  # within a line that is too long
        self.problem: str | None = None

    def poll(self) -> News:
        """Return what is new. Raises nothing."""
        self.problem = None
        try:
            with open(self._path, "rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return News([], restarted=self._forget())
        except OSError as error:
            self.problem = error.strerror or type(error).__name__
            return News([])

    def rest(self) -> News:
        """Return a last line without an end, once the run is over and none will come."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._place)
                line = file.read(LONGEST_LINE)
        except OSError:
            return News([])
        return self._news([b"" if b"\n" in line else line] if line.strip() else [])

    def _news(self, lines: list[bytes], restarted: bool = False, more: bool = False) -> News:
        found = [parsed_line(line, self._keys) for line in lines]
        objects = [one for one in found if one is not None]
        return News(objects, restarted, len(found) - len(objects), more)

    def _read(self, file: BinaryIO) -> News:
        status = os.fstat(file.fileno())
        same = (status.st_dev, status.st_ino) == self._file and status.st_size >= self._place
        if same and self._place:
            file.seek(self._place - len(self._witness))
            same = file.read(len(self._witness)) == self._witness
        restarted = False if same else self._forget()
        self._file = (status.st_dev, status.st_ino)
        file.seek(self._place)
        data = file.read(_AT_ONCE)
        end, full = data.rfind(b"\n") + 1, len(data) == _AT_ONCE
        if not end and not full:  # its end is still to come
            return News([], restarted)
        taken = data[:end] if end else data
        self._place += len(taken)
        self._witness = (self._witness + taken[-_WITNESS:])[-_WITNESS:]
        more = full and self._place < status.st_size
        if not end:  # the line is too long to be ours
            broken, self._skipping = int(not self._skipping), True
            return News([], restarted, broken, more)
        lines = data[:end].split(b"\n")
        if self._skipping:
            lines, self._skipping = lines[1:], False
        return self._news([line for line in lines if line.strip()], restarted, more)

    def _forget(self) -> bool:
        """Begin anew; return whether anything had been read."""
        had, self._place, self._witness, self._skipping = self._place > 0, 0, b"", False
        self._file = (0, 0)
        return had
