"""Each rank's ids as one list of all, and the rank of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_silent.exchange.row_ids import Ids


def by_rank(ids: Sequence[Ids]) -> tuple[Ids, Ids]:
    """(M,) ids and (M,) ranks of ``ids[rank]``, int64 of any length each."""
    owners = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
    return np.concatenate([*ids, np.empty(0, np.int64)]).astype(np.int64), owners
