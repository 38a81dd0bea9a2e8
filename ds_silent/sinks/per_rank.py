"""``per_rank.bin``: every rank's loss, gradient norm and cosine of each step, where ``metrics.jsonl`` has no room.

    sink = PerRankSink("runs/my-run")
    sink.write(record)
    for step in read_per_rank("runs/my-run/per_rank.bin"):       # one per step, by step; read when they are asked for
        step.step, step.loss, step.grad_norm, step.cosine        # 12, float32 (N,) each, None where not measured

The file begins with 16 bytes: ``MAGIC``, the version and 0, both uint32. A block per step follows: a head of 32 bytes
(``MARK``, ranks, columns, the check sum of the values, the step as uint64, 0, the check sum of the head before it),
then N float32 for each column that is there, in the order of ``COLUMNS``. Columns are bits: 1 is the first. Everything
is little-endian; check sums are CRC-32.

Like the files of lines it is only ever appended to, a block with one call: a killed process tears at most its last
block, which the reader leaves out, wherever the next run goes on behind it. A step that a resumed run writes again
retires what was written of it and of later steps before.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds_silent.metrics import RANK_METRICS
from ds_silent.records import StepRecord
from ds_silent.sinks.base import logger
from ds_silent.sinks.files import MOST_RANKS, AppendedFile, FileSink

NAME = "per_rank.bin"
MAGIC, VERSION = b"dssranks", 1
MARK = b"STEP"
COLUMNS = tuple(metric.name for metric in RANK_METRICS)
Values = npt.NDArray[np.float32]
_START = struct.Struct("<8sII")
_HEAD = struct.Struct("<4sIIIQI")
_CHECK = struct.Struct("<I")
_HEAD_SIZE = _HEAD.size + _CHECK.size
_CHUNK = 1 << 20


class PerRankError(ValueError):
    """It is no such file; the message is one sentence."""


@dataclass(frozen=True)
class RanksOfStep:
    """float32 (N,) each, by rank; None where it was not measured."""

    step: int
    loss: Values | None
    grad_norm: Values | None
    cosine: Values | None


@dataclass(frozen=True)
class _StepBlock:
    """Where a step's values are, and their check sum."""

    step: int
    ranks: int
    columns: int
    check: int
    begins: int

    @property
    def ends(self) -> int:
        return self.begins + 4 * self.ranks * self.columns.bit_count()


class PerRankSink(FileSink):
    """Appends to ``per_rank.bin`` of a directory, which comes with the first record of more than ``MOST_RANKS``.

    A sink of its own: what goes wrong here costs no line of ``metrics.jsonl``.
    """

    def write(self, record: StepRecord) -> None:
        """Write one step's values; nothing where the ranks are few, or nothing was measured.

        Raises OSError for a full disk, a removed file; SinkError, PerRankError where it cannot be opened or is foreign.
        """
        data = block_of(record) if record.world_size > MOST_RANKS else b""
        if data:
            self._files = self._files or {NAME: _opened(self._directory / NAME)}
            self._files[NAME].write(data)


def block_of(record: StepRecord) -> bytes:
    """Return a step's block; empty where nothing was measured."""
    measured = {bit: values for bit, metric in enumerate(RANK_METRICS) if (values := metric.of(record)) is not None}
    if not measured:
        return b""
    with np.errstate(over="ignore"):  # what fp32 cannot hold is an infinity
        table = np.array([*measured.values()], dtype="<f4")
    data = table.tobytes()
    head = _HEAD.pack(MARK, table.shape[1], sum(1 << bit for bit in measured), zlib.crc32(data), record.step, 0)
    return head + _CHECK.pack(zlib.crc32(head)) + data


def _opened(path: Path) -> AppendedFile:
    """Open it to go on with; a start that was torn holds nothing yet, and is made anew."""
    file = AppendedFile(path)
    try:
        with open(path, "rb") as written:
            if not _is_started(written, path):
                os.truncate(path, 0)
                file.write(_START.pack(MAGIC, VERSION, 0))
    except (OSError, PerRankError):
        file.close()
        raise
    return file


def read_per_rank(path: str | Path) -> Iterator[RanksOfStep]:
    """Yield the steps of a ``per_rank.bin``, by step; torn blocks are skipped, and a warning says how many.

    The values are read one step at a time.

    Raises:
        OSError: the file cannot be read.
        PerRankError: it is another file, or of a newer version.
    """
    torn = 0
    with open(path, "rb") as file:
        kept: list[_StepBlock] = []
        for block in _blocks(file, path):
            while block is not None and kept and kept[-1].step >= block.step:
                kept.pop()
            kept += [] if block is None else [block]
            torn += block is None
        for block in kept:
            data = _data_of(file, block)
            if data is None:
                torn += 1
                continue
            table = iter(np.frombuffer(data, dtype="<f4").reshape(-1, block.ranks))
            each = [next(table) if block.columns >> bit & 1 else None for bit in range(len(COLUMNS))]
            yield RanksOfStep(block.step, *each)
    if torn:
        logger.warning("ds_silent: %s: %d torn blocks skipped", ascii(os.fspath(path)), torn)


def _blocks(file: BufferedReader, path: str | Path) -> Iterator[_StepBlock | None]:
    """Yield them in the order of the file; None for a gap that is no block."""
    if not _is_started(file, path):
        return
    size, place = file.seek(0, os.SEEK_END), _START.size
    while place < size:
        block = _block_at(file, place)
        # it is what stands between two heads; where no other head follows, its values tell
        if block is not None and not (block.ends == size or _block_at(file, block.ends) or _data_of(file, block)):
            block = None
        yield block
        place = block.ends if block is not None else _next_mark(file, place + 1, size)


def _is_started(file: BufferedReader, path: str | Path) -> bool:
    """Return whether the file has its first 16 bytes, wholly; raise PerRankError where it begins otherwise."""
    start, whole = file.read(_START.size), _START.pack(MAGIC, VERSION, 0)
    if start == whole:
        return True
    if whole.startswith(start):
        return False
    if not start.startswith(MAGIC):
        raise PerRankError(f"{os.fspath(path)!a} is no per_rank.bin of ds_silent: it does not begin as one")
    raise PerRankError(
        f"{os.fspath(path)!a} is not of version {VERSION}, the only one that this ds_silent knows; install a newer one"
    )


def _block_at(file: BufferedReader, place: int) -> _StepBlock | None:
    """Return the block whose head is at ``place``; None where there is none."""
    file.seek(place)
    head = file.read(_HEAD_SIZE)
    if len(head) < _HEAD_SIZE or _CHECK.unpack(head[_HEAD.size :])[0] != zlib.crc32(head[: _HEAD.size]):
        return None
    mark, ranks, columns, check, step, _ = _HEAD.unpack(head[: _HEAD.size])
    return _StepBlock(step, ranks, columns, check, place + _HEAD_SIZE) if mark == MARK else None


def _data_of(file: BufferedReader, block: _StepBlock) -> bytes | None:
    """Return the values as they stand there; None where they are damaged."""
    file.seek(block.begins)
    data = file.read(block.ends - block.begins)
    return data if zlib.crc32(data) == block.check else None


def _next_mark(file: BufferedReader, place: int, size: int) -> int:
    """Return where the next head is, from ``place`` on; the file's end where there is none."""
    while place < size:
        file.seek(place)
        chunk = file.read(_CHUNK)
        found = chunk.find(MARK)
        while found >= 0:
            if _block_at(file, place + found) is not None:
                return place + found
            found = chunk.find(MARK, found + 1)
        place += max(len(chunk) - len(MARK) + 1, 1)
    return size
