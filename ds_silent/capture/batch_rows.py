"""Which rows this rank's micro-batches hold, from ids that the script gives or else from the model's inputs.

rows = RowIds(enabled=True, capacity=64, micro_batch=4, ranks=8)
rows.given(sample_ids); rows.forward(args, kwargs)       # per micro-batch, in this order
packed = rows.take(device)                               # at a measured step: everything since the last one
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.config import SilentConsistencyConfig
from ds_silent.exchange.row_ids import MAX_ROWS, batch_tensors, pack_rows, row_hashes, sampling_of

logger = logging.getLogger("ds_silent")
IGNORED_LABEL = -100  # torch.nn.CrossEntropyLoss's default ignore_index, and Hugging Face's


def id_capacity(config: SilentConsistencyConfig, rows_per_step: int) -> int:
    """Rows of a rank that one observation looks at; 0 with ``coverage`` off. The same on every rank."""
    return min(config.interval * rows_per_step, MAX_ROWS) if config.coverage else 0


class RowIds:
    """Collects ids until they are sent. ``capacity`` rows at most are kept; what is lost is counted.

    Args:
        micro_batch: rows per rank and micro-batch, as configured.
        ranks: N, on which it depends whether all rows are sent or a sample.

    Attributes:
        sampling: which rows are sent.
        starts: places in what was taken last at which a loader had begun anew.
        told: whether all of it were ids that the script has told.
    """

    def __init__(self, enabled: bool, capacity: int, micro_batch: int, ranks: int = 1):
        self.sampling = sampling_of(ranks, capacity)
        self.enabled, self._capacity, self._micro_batch = enabled, capacity, micro_batch
        self._ids: list[Tensor] = []  # of micro-batches that have been forwarded
        self._given: list[Tensor] = []  # told by the script, whose forward is to come
        self._hashed: list[int] = []  # places in _ids of this step's micro-batches that nobody told of
        self._begins: list[int] = []  # places in _ids of the first micro-batches of passes over the data
        self.starts: tuple[int, ...] = ()
        self.told = False
        self._told = True  # of what waits, as far as earlier steps go
        self._warned = False
        self._label_tokens: Tensor | None = None
        self._start = self._behind = 0  # places in _ids: of the step's first micro-batch, and behind its last backward
        self._tokens_behind: Tensor | None = None  # of the step's, those whose backward has come

    def given(self, sample_ids: Tensor) -> None:
        """Ids of the next micro-batch, int64 (rows,), on any device."""
        if self.enabled:
            self._given.append(sample_ids)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], begins: bool = False) -> None:
        """The inputs of one training forward; ``begins``: the first of a pass over the data."""
        if not self.enabled:
            return
        if begins:
            self._begins.append(len(self._ids))
        labels = kwargs.get("labels")
        if isinstance(labels, Tensor) and labels.ndim == 2 and not labels.dtype.is_floating_point:
            tokens = (labels[:, 1:] != IGNORED_LABEL).sum()
            self._label_tokens = tokens if self._label_tokens is None else self._label_tokens + tokens
        tensors, mask = batch_tensors(args, kwargs)
        tensors = [tensor for tensor in tensors if tensor.ndim]
        if self._given:
            given = self._given.pop(0)
            rows = {int(tensor.shape[0]) for tensor in tensors}
            if not rows or len(given) in rows | {self._micro_batch}:
                self._ids.append(given)
                return
            self._warn(len(given), int(tensors[0].shape[0]))
        if tensors:
            self._hashed.append(len(self._ids))
            self._ids.append(row_hashes(tensors, mask))

    def _warn(self, ids: int, rows: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "ds_silent: observe_batch was given %d ids for a micro-batch of %d rows on rank %d; pass one id per "
                "row, till then the rows are followed by their content (said once)",
                ids,
                rows,
                dist.get_rank() if dist.is_initialized() else 0,
            )

    def _told_late(self) -> None:
        """Ids of this step that no forward came after: the script tells of a micro-batch when it is through."""
        while self._given and self._hashed:
            place, given = self._hashed.pop(0), self._given.pop(0)
            rows = len(self._ids[place])
            if len(given) in (rows, self._micro_batch):
                self._ids[place] = given
            else:
                self._warn(len(given), rows)
        self._ids += self._given  # the forward was not the observed module's
        self._given = []

    def backward_ended(self) -> None:
        """What was forwarded until now is in the gradients, or never will be."""
        self._behind, self._tokens_behind = len(self._ids), self._label_tokens

    def drop(self) -> None:
        """Forget the rows of this step whose backward has come: they were never to be of a step."""
        start, gone = self._start, self._behind - self._start
        if gone <= 0:
            return
        del self._ids[start : self._behind]
        kept = (place for place in self._hashed if not start <= place < self._behind)
        self._hashed = [place - gone if place > start else place for place in kept]
        self._begins = sorted({max(place - gone, start) if place > start else place for place in self._begins})
        if self._label_tokens is not None and self._tokens_behind is not None:
            self._label_tokens = self._label_tokens - self._tokens_behind
        self._behind, self._tokens_behind = start, None

    @property
    def waiting(self) -> bool:
        """Whether ids wait to be sent."""
        return bool(self._ids)

    def take(self, device: torch.device) -> Tensor | None:
        """Packed ids of the rows since the last call, fp32 (sampling.numbers,) on ``device``; None when off."""
        if not self.enabled:
            return None
        self._told_late()
        places = [0]
        for one in self._ids:
            places.append(places[-1] + len(one))
        lost = max(0, places[-1] - self._capacity)
        self.starts = tuple(places[index] - lost for index in self._begins if places[index] >= lost)
        self.told = self._told and not self._hashed
        ids, self._ids, self._hashed, self._begins, self._told = self._ids, [], [], [], True
        if not ids:
            return None
        together = torch.cat([one.to(ids[-1].device) for one in ids])
        return pack_rows(together, self.sampling).to(device, non_blocking=True)

    def take_label_tokens(self) -> Tensor | None:
        """Tokens that entered this step's loss, 0-dim; None when the inputs have no labels."""
        return None if self._label_tokens is None else self._label_tokens.float()

    def end_step(self) -> None:
        """Forget what belongs to one step only; ids of unmeasured steps wait for the next observation."""
        self._label_tokens = self._tokens_behind = None
        self._told_late()
        self._told &= not self._hashed
        self._hashed = []
        kept = sum(len(one) for one in self._ids)
        while len(self._ids) > 1 and kept - len(self._ids[0]) > self._capacity:
            kept -= len(self._ids.pop(0))
            self._begins = [index - 1 for index in self._begins if index > 0]
        self._start = self._behind = len(self._ids)
