"""Rows that a rank takes again right after it took them: what a loader that is stuck looks like, or a small shard.

recent = RecentRows()
recent.repeats(ids)        # once per observation, in their order: how many of each rank's rows it had just held
recent.distinct            # how many different rows each rank has had so far, about
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_silent.exchange.row_ids import Ids
from ds_silent.maths.mixing import mix64

REGISTERS = 64
_POWERS = np.ldexp(1.0, -np.arange(64)).astype(np.float32)
_BIAS = 0.709  # of 64 registers (Flajolet et al., HyperLogLog, 2007)


@dataclass(frozen=True)
class OwnPasses:
    """What tells a pass over a rank's own rows from a loader that is stuck, per rank and of the rows that were sent.

    Attributes:
        window: rows since the last measured step, and in the one before.
        distinct: different rows so far, about.
        again: of the rows that had come before, whichever rank's, the share that the same rank had taken then.
    """

    window: tuple[int, ...]
    distinct: tuple[float, ...]
    again: float | None = None


class RecentRows:
    """Remembers each rank's newest rows, 8 bytes per row, which a resume forgets: that costs one observation. And 64
    bytes per rank, from which the number of its different rows follows, to about 13 %.

    Attributes:
        window: rows of each rank that are remembered, those of the newest observation among them.
    """

    def __init__(self) -> None:
        self.window: tuple[int, ...] = ()
        self._held: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._counts: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._registers: npt.NDArray[np.uint8] = np.empty((0, REGISTERS), dtype=np.uint8)

    def repeats(self, ids: Sequence[Ids]) -> tuple[int, ...]:
        """Per rank, how many of these rows it had taken before, among them or in the observation before.

        Args:
            ids: of every rank, int64 (rows,), the rows since the last observation.
        """
        owners = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
        return self.repeats_of(np.concatenate([*ids, np.empty(0, np.int64)]), owners, len(ids))

    def repeats_of(self, values: Ids, owners: Ids, ranks: int) -> tuple[int, ...]:
        """The same of N ``ranks``, from all rows and the rank of each: int64 (M,), each rank's in their order."""
        ranks_of = mix64(owners.astype(np.uint64))
        keys = mix64(np.ascontiguousarray(values).view(np.uint64) ^ ranks_of)  # another rank's visit is no repeat
        again = np.isin(keys, self._held)
        new = np.ones(len(keys), dtype=bool)
        new[np.unique(keys, return_index=True)[1]] = False
        again |= new  # a later visit within this observation
        self._held = keys
        rows = np.bincount(owners, minlength=ranks)
        if len(self._registers) != ranks:
            self._registers = np.zeros((ranks, REGISTERS), dtype=np.uint8)
            self._counts = np.zeros(ranks, dtype=np.int64)
        self.window = tuple((self._counts + rows).tolist())
        self._counts = rows
        self._note(keys, owners)
        counts = np.bincount(owners, weights=again, minlength=ranks)
        return tuple(int(count) for count in counts)

    def _note(self, keys: npt.NDArray[np.uint64], owners: Ids) -> None:
        register = (keys & np.uint64(REGISTERS - 1)).astype(np.int64)
        _, exponent = np.frexp((keys >> np.uint64(11)).astype(np.float64))  # exactly: 53 bits
        zeros = (53 - exponent + 1).astype(np.uint8)  # leading ones of them, from 1
        np.maximum.at(self._registers, (owners, register), zeros)

    @property
    def distinct(self) -> tuple[float, ...]:
        """Of each rank, of the rows that were sent."""
        registers = self._registers
        estimate = _BIAS * REGISTERS**2 / _POWERS[registers].sum(1)
        empty = (registers == 0).sum(1)
        few = (estimate <= 2.5 * REGISTERS) & (empty > 0)
        counted = REGISTERS * np.log(REGISTERS / np.maximum(empty, 1))
        return tuple(np.where(few, counted, estimate).tolist())

    def state_dict(self) -> dict[str, Any]:
        """JSON values: how many different rows each rank has had."""
        packed = zlib.compress(self._registers.tobytes())
        return {"ranks": len(self._registers), "distinct": base64.b64encode(packed).decode("ascii")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: it is damaged.
        """
        try:
            packed = zlib.decompress(base64.b64decode(state["distinct"], validate=True))
            registers = np.frombuffer(packed, dtype=np.uint8).reshape(int(state["ranks"]), REGISTERS)
        except (TypeError, ValueError, binascii.Error, zlib.error) as error:
            raise ValueError(f"the number of each rank's rows in the checkpoint cannot be read ({error})") from error
        self._registers, self._counts = registers.copy(), np.zeros(len(registers), dtype=np.int64)
