"""Directories and append-only files that survive ``kill -9``, a full disk and a resumed run."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from ds_silent.sinks.base import SinkError


def make_directory(directory: Path) -> None:
    """Create ``directory`` and prove that a file can be created in it.

    Raises:
        SinkError: it cannot, with the path, the reason and the remedy.
    """
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
        """Append ``data``.

        Raises:
            OSError: the disk is full, or the file is no longer in its directory.
        """
        while data:  # one round, unless the disk fills up in the middle
            data = data[os.write(self._fd, data) :]
        if os.fstat(self._fd).st_nlink == 0:  # a write to a deleted file succeeds, and nobody will ever read it
            raise OSError(errno.ENOENT, "the file was removed while the run was writing it", os.fspath(self._path))

    def size(self) -> int:
        """Bytes that the file holds."""
        return os.fstat(self._fd).st_size

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
            self._end_torn_line()
        except OSError as error:
            os.close(self._fd)
            raise refused(path, error) from None

    def append(self, line: str) -> None:
        """Write ``line``, which holds no newline, and its newline; raises as :meth:`write`."""
        self.write(line.encode("utf-8") + b"\n")

    def _end_torn_line(self) -> None:
        size = self.size()
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")


def refused(path: Path, error: OSError) -> SinkError:
    reason = error.strerror or type(error).__name__
    return SinkError(
        f"silent_consistency.output_dir: {os.fspath(path)!a} cannot be written ({reason}); "
        "choose a directory that rank 0 can create files in"
    )
