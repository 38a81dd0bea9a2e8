"""What the ranks' samples say besides the metrics: which rows they held, whose gradient broke, who stayed silent.

rows = RowTracker()
coverage, evidence = testimony(gathered, rows, context)      # on the writing rank, in the order of the steps
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_silent.coverage import EpochCoverage, duplicates, epoch_is_over
from ds_silent.detectors import Coverage, Evidence
from ds_silent.detectors.evidence import LayerValues
from ds_silent.exchange import Gathered
from ds_silent.measure import Context, on_all
from ds_silent.recent_rows import RecentRows
from ds_silent.records import CoverageStats
from ds_silent.sample_ids import unpack_ids


@dataclass(frozen=True)
class RowsOfStep:
    """What the ids of one sample say."""

    coverage: CoverageStats
    epoch: Coverage | None  # None where the shares are not known
    pairs: Mapping[tuple[int, int], int]  # rows that two ranks share
    rows: tuple[int, ...]  # of the step itself, per rank
    own_rows: tuple[int, ...]  # since the last sample, per rank
    own_repeats: tuple[int, ...]  # those of them that the same rank had taken just before


class RowTracker:
    """Follows the rows of the current epoch over all ranks; constant memory, see :class:`EpochCoverage`."""

    def __init__(self) -> None:
        self._epoch = EpochCoverage()
        self._recent = RecentRows()
        self._partial = False  # rows were missed in this epoch: shares would be wrong

    def step(self, ids: Tensor, own_rows: int, rows_in_epoch: int | None) -> RowsOfStep | None:
        """Take in what all ranks sent: (N, n) packed ids of the rows since the last sample.

        Args:
            own_rows: rows per rank of the measured step itself, the last ones sent.
            rows_in_epoch: None when not known: then no shares.

        Returns:
            None when a rank sent no ids.
        """
        sent = unpack_ids(ids)
        if min(sent.rows) <= 0:
            self._partial = True
            return None
        of_step = [one[-own_rows:] for one in sent.per_rank]
        found = duplicates(of_step)
        pairs = {(min(a, b), max(a, b)): shared for a, b, shared in found.pairs}
        rows = tuple(len(one) for one in of_step)
        own = (tuple(len(one) for one in sent.per_rank), self._recent.repeats(sent.per_rank))
        self._partial |= not sent.complete
        together = np.concatenate(sent.per_rank)
        if rows_in_epoch is not None and epoch_is_over(
            self._epoch.visits, len(together), rows_in_epoch, len(sent.per_rank)
        ):
            self._epoch.start_epoch()
            self._partial = False
        self._epoch.update(together)
        if rows_in_epoch is None or self._partial:
            return RowsOfStep(CoverageStats(duplicates=found.count), None, pairs, rows, *own)
        seen = self._epoch.seen(rows_in_epoch)
        consumed = self._epoch.visits / rows_in_epoch
        repeated = max(0.0, consumed - seen.value)
        coverage = Coverage(consumed, seen.value, repeated, rows_in_epoch, seen.standard_error)
        return RowsOfStep(CoverageStats(found.count, seen.value, repeated), coverage, pairs, rows, *own)

    def state_dict(self, unsent: bool) -> dict[str, Any]:
        """What continues the epoch after a resume.

        Args:
            unsent: rows of steps since the last sample wait on the ranks; a checkpoint does not hold them, so after a
                resume the shares of this epoch are not known.
        """
        return {"epoch": self._epoch.state_dict(), "partial": self._partial or unsent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: it is damaged.
        """
        self._epoch.load_state_dict(state["epoch"])
        self._partial = bool(state["partial"])


def testimony(gathered: Gathered, tracker: RowTracker, context: Context) -> tuple[CoverageStats, Evidence]:
    """Coverage for the record, and what the detectors need besides the record."""
    scalars = gathered.scalars
    tokens, fired = scalars["label_tokens"], scalars["fired"]
    told = tracker.step(gathered.ids, int(context.batch), context.rows_in_epoch) if gathered.ids.numel() else None
    non_finite, zero = _broken(gathered, context.layer_names)
    coverage = CoverageStats() if told is None else told.coverage
    return coverage, Evidence(
        duplicates=None if told is None else told.pairs,
        rows_per_rank=None if told is None else told.rows,
        own_rows=None if told is None else told.own_rows,
        own_repeats=None if told is None else told.own_repeats,
        label_tokens=tuple(int(n) for n in tokens.tolist()) if bool((tokens > 0).any()) else None,
        coverage=None if told is None else told.epoch,
        non_finite=non_finite,
        zero_gradient=zero,
        stale_parameters=tuple(int(n) for n in (fired.max() - fired).tolist()),
        step_skipped=context.skipped,
        layers=_layer_values(gathered, context.layer_names),
    )


def _layer_values(gathered: Gathered, names: tuple[str, ...]) -> LayerValues | None:
    """Each layer's norm, exact or from its sketch, and its cosine with the others' mean, where sketches were sent."""
    if len(names) < 2 or not on_all(gathered.scalars["gradient_seen"]):
        return None
    squares, cosines = gathered.layer_squares, None
    sketches = gathered.layer_sketches
    exact = on_all(gathered.scalars["norm_seen"]) and not bool((gathered.scalars["leftover_squared"] != 0).any())
    if sketches is not None:
        rest = sketches.sum(0) - sketches
        own = sketches.square().sum(2)
        cosines = ((sketches * rest).sum(2) / (own * rest.square().sum(2)).sqrt()).numpy()
        squares = squares if exact else own
    elif not exact:
        return None
    return LayerValues(names, squares.log().numpy() / 2.0, cosines)


def _broken(gathered: Gathered, names: tuple[str, ...]) -> tuple[dict[int, str | None], dict[int, str | None]]:
    """Rank -> layer of non-finite and of zero gradients. Backward runs from the last layer to the first, so a NaN is
    born in the last layer that has one."""
    if not bool((gathered.scalars["gradient_seen"] > 0).all()):
        return {}, {}
    norms_known = bool((gathered.scalars["norm_seen"] > 0).all())
    squares: Tensor = gathered.layer_squares
    whole = gathered.scalars["squared_norm"]
    if not norms_known:
        if gathered.sketches is None:
            return {}, {}
        squares, whole = squares[:, :0], gathered.sketches.square().sum(dim=1)
    non_finite: dict[int, str | None] = {}
    zero: dict[int, str | None] = {}
    for rank, total in enumerate(whole.tolist()):
        if not np.isfinite(total):
            layers = torch.nonzero(~torch.isfinite(squares[rank])).flatten().tolist()
            non_finite[rank] = names[layers[-1]] if layers else None
        elif total == 0.0:
            zero[rank] = None
    return non_finite, zero
