"""When the replicas are compared, and whether the weights are those of the checkpoint that was loaded.

    checks = ReplicaChecks(config, framework.replicated(), group, after_updates=False)
    checks.due = True                        # a checkpoint: compare with the next observation
    whole = checks.capture(step, step)       # int64 (), travels with the observation; None where nothing is due
    if checks.differ(gathered):              # the same on every rank
        drift = checks.localise(once)        # a collective

Whether anything is compared depends on the step, on checkpoints, which all ranks write together, and on what all ranks
have read: a rank that alone was asked (a resume) asks the others first, with its next observation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.together import Once
from ds_silent.exchange.observation import Gathered, on_all
from ds_silent.kernels.checksums import Items
from ds_silent.records import Event
from ds_silent.replicas.compare import Drift
from ds_silent.replicas.history import Replicas

REMEMBERED = 10
"""Times between two comparisons of the replicas at which checksums are remembered, to find the first bad step by."""


class ReplicaChecks:
    """One rank's part.

    Attributes:
        due: compare at the next opportunity, whatever the interval says; the same on every rank.
        wanted: this rank wants all ranks to compare.
        after_updates: a response compares them there, and not the observations.
    """

    def __init__(
        self,
        config: SilentConsistencyConfig,
        replicated: tuple[Items, Callable[[], Items]],
        group: dist.ProcessGroup,
        after_updates: bool,
    ):
        parameters, others = replicated
        self.due = self.wanted = False
        self.after_updates = after_updates
        self._every, self._interval, self._group = config.integrity.replica_interval, config.interval, group
        compares = bool(self._every and parameters)
        self._replicas = Replicas(parameters, others, history=REMEMBERED + 2) if compares else None
        self._loaded: str | None = None  # checksum in the checkpoint that was loaded

    def take_due(self) -> bool:
        """Whether a comparison is due; it is not any more."""
        due, self.due = self.due, False
        return due

    def capture(self, step: int, scheduled: int) -> Tensor | None:
        """The replica's checksum where it is to be compared, and memories on the way there.

        Args:
            step: the framework's own, by which it is remembered.
            scheduled: the same on every rank.
        """
        if self._replicas is None or self.after_updates:
            return None
        due = self.take_due() or self._passed(scheduled, self._every)
        if due or self._passed(scheduled, -(-self._every // REMEMBERED)):
            self._replicas.remember(step)
        return self._replicas.check(step) if due else None

    def _passed(self, step: int, every: int) -> bool:
        """Whether a multiple of ``every`` lies behind the last measured step, and not behind this one."""
        return step // every != (step - self._interval) // every

    def differ(self, gathered: Gathered) -> bool:
        """Whether the replicas were compared and hold different bits."""
        if self._replicas is None or gathered.hashes is None or not on_all(gathered.reduced.replica_seen):
            return False
        replicas = gathered.hashes[:, 0]
        apart = bool((replicas != replicas[0]).any())
        if not apart:
            self._replicas.equal()
        return apart

    def localise(self, once: Once) -> Drift | None:
        """The tensors that differ, where :meth:`differ`. A collective."""
        assert self._replicas is not None
        return self._replicas.localise(self._group, once)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def weights(self) -> str | None:
        """Checksum of the weights, for a checkpoint; None where they are not replicated or not compared."""
        return None if self._replicas is None else self._replicas.weights()

    def loaded(self, weights: str | None) -> None:
        """A checkpoint was loaded that held this checksum."""
        self._loaded = weights
        if self.after_updates:
            self.wanted = True  # this rank alone may have been asked: all hear of it first
        else:
            self.due = True

    def verify(self, step: int) -> Event | None:
        """Once after a resume: the weights that ``step`` starts from. The comparison speaks for the other ranks."""
        due, self._loaded = self._loaded, None
        if due is None or self._replicas is None:
            return None
        found = self._replicas.weights()
        if found == due:
            return None
        message = f"The weights that step {step} starts from ({found}) are not those of the checkpoint ({due})."
        remedy = "Load the checkpoint again, compare its files with their source, and do not go on from here."
        return Event(step, "initial-weights-mismatch", "error", (), "checkpoint", None, None, message, remedy)
