"""Say once that this rank waits for the others in the observer's collective, while its own thread cannot.

    notice = StallNotice(group, lambda: capture.step)
    with notice.waiting():
        ...                                     # what waits for the other ranks

Ranks that have parted wait in collectives that never pair, without a word, until a process group times out. The others
may wait in the training's own collectives, where nobody but they could say so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ds_silent.distributed.agreement import store_of_all, timeout_seconds

logger = logging.getLogger("ds_silent")
TELLERS = 4  # ranks that say it: all may wait for one


class StallNotice:
    """Watch one place at which a rank waits for those of ``group``, from a thread that starts with the first wait.

    Args:
        step: the step under way on this rank.
    """

    def __init__(self, group: dist.ProcessGroup, step: Callable[[], int]):
        self._group, self._step = group, step
        self._since: float | None = None
        self._over = threading.Event()
        self._started = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of a block as waiting for the others."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._watch, args=(timeout_seconds(),), name="ds_silent stall", daemon=True).start()
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    def _watch(self, seconds: float) -> None:
        while not self._over.wait(min(seconds / 4.0, 10.0)):
            since = self._since
            if since is not None and time.monotonic() - since >= seconds:
                self._tell(seconds)
                return

    def _tell(self, seconds: float) -> None:
        if self._told() > TELLERS:
            return
        logger.warning(
            "ds_silent: rank %d waits at step %d for what other ranks have measured, since %.0f s (DS_SILENT_TIMEOUT): "
            "they have not come to this step. Nothing is wrong where one of them takes long, as with a checkpoint. "
            "Else they wait for this rank in another collective, because it has left out a reduction: it has called "
            "the model without its wrapper, or used no_sync(), or left out a batch. py-spy dump --pid shows where a "
            "process is (said once)",
            dist.get_rank(self._group),
            self._step(),
            seconds,
        )

    def _told(self) -> int:
        """Count the ranks that say it, this one too."""
        store = store_of_all()
        try:
            return 1 if store is None else int(store.add("ds_silent stall", 1))
        except Exception:  # the rank that holds the store is gone
            return 1
