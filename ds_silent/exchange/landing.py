"""A collective's result on its way to the host, beside the training.

landing = Landing(source)
landing.start(work)              # source is being filled by an asynchronous collective
values = landing.result()        # a step later: no waiting in practice
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ds_silent.device import SideStream, pinned


class Landing:
    """Brings one collective's result to the host beside the training: no stream of the training waits for it."""

    def __init__(self, source: Tensor):
        self._source = source
        self._on_host = source.device.type == "cpu"
        self._work: dist.Work | None = None
        self._copying = False
        if not self._on_host:
            self._host = pinned(source)
            self._side = SideStream(source.device)

    def start(self, work: dist.Work | None) -> None:
        """``work`` is under way; on a device, its result is copied as soon as it is there."""
        self._work, self._copying = work, False
        if not self._on_host:
            self._copy()

    def _copy(self) -> None:
        with self._side.working():
            if self._work is not None:
                self._work.wait()  # orders the side stream after the collective; the host goes on
            self._host.copy_(self._source, non_blocking=True)
        self._copying = True

    def result(self) -> Tensor:
        """The landed fp32 values; the copy was started a step ago."""
        if not self._on_host:
            if not self._copying:  # starting it broke
                self._copy()
            self._side.wait()
            return self._host
        if self._work is not None:
            self._work.wait()
        return self._source
