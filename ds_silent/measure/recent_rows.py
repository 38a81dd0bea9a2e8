"""Rows that a rank takes again right after it took them: what a loader that is stuck looks like.

recent = RecentRows()
recent.repeats(ids)        # once per observation, in their order: how many of each rank's rows it had just held
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds_silent.exchange.row_ids import Ids, mix64


class RecentRows:
    """Remembers each rank's newest rows only: 8 bytes per row. A resume forgets them, which costs one observation."""

    def __init__(self) -> None:
        self._held: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)

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
        counts = np.bincount(owners, weights=again, minlength=ranks)
        return tuple(int(count) for count in counts)
