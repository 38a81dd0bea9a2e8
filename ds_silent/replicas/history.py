"""Since when do replicas differ? Their checksums, remembered at every step and compared now and then.

    replicas = Replicas(parameters, others, history=12)
    replicas.remember(step)                      # several times between checks: the checksums stay on the device
    whole = replicas.check(step)                 # now and then: int64 (), which travels with the observation
    drift = replicas.localise(group)             # a collective, only after all ranks have seen that they differ

From what is remembered since the last comparison follows the first step after which the replicas differed, or a few
steps in which that one is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.distributed.together import Once, at_once
from ds_silent.kernels.checksums import Bits, Checksums, Items, bytes_of, combined
from ds_silent.replicas.compare import Drift, compare_tensors, equal_on_all


class Replicas:
    """Checksums of one rank's replica.

    Args:
        parameters: names and tensors that are remembered.
        others: called at a comparison: names and tensors of everything else that is replicated then.
        history: how many steps are remembered.
    """

    def __init__(self, parameters: Items, others: Callable[[], Items], history: int):
        self._parameters, self._others = list(parameters), others
        device = self._parameters[0][1].device if self._parameters else torch.device("cpu")
        self._checksums = Checksums([bytes_of(tensor) for _, tensor in self._parameters], device)
        self._bits_of_others = Bits()
        self._history = torch.zeros(max(1, history), len(self._parameters), dtype=torch.int64, device=device)
        self._steps = [-1] * len(self._history)
        self._newest = -1  # slot
        self._apart_since: tuple[int, int] | None = None  # as found first: later, no equal checksum is remembered
        self._checked: tuple[int, list[str], Tensor] | None = None

    def remember(self, step: int) -> None:
        """Checksums of the parameters as optimizer step ``step`` finds them."""
        self._newest = (self._newest + 1) % len(self._steps)
        self._history[self._newest] = self._now()
        self._steps[self._newest] = step

    def check(self, step: int) -> Tensor:
        """int64 () checksum of everything that is replicated. :meth:`remember` was called for this step."""
        others = list(self._others())
        rest = [self._bits_of_others(others).to(self._history.device)] if others else []
        values = torch.cat((self._history[self._newest], *rest))
        self._checked = (step, [name for name, _ in [*self._parameters, *others]], values)
        return combined(values)

    def weights(self) -> str:
        """Checksum of the parameters as they are now, as 16 hexadecimal digits. Waits for the device."""
        return f"{int(combined(self._now())) & 0xFFFFFFFFFFFFFFFF:016x}"

    def _now(self) -> Tensor:
        return self._checksums([tensor for _, tensor in self._parameters])

    def localise(self, group: dist.ProcessGroup, once: Once = at_once) -> Drift | None:
        """The tensors that differ at the last :meth:`check`. A collective: every rank calls it at the same step."""
        assert self._checked is not None
        step, names, values = self._checked
        own = torch.tensor([len(values), -len(values)], dtype=torch.int32, device=values.device)
        count = once(lambda: own)  # played again, the buffer that was reduced
        once(lambda: dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group))
        if int(count[0]) != -int(count[1]):  # not even the same tensors
            return None
        found = compare_tensors(values, group, once)
        different = ~equal_on_all(combined(self._history), group, once)
        since = [s for s, bad in zip(self._steps, different.tolist(), strict=True) if bad and 0 <= s <= step]
        if not since:
            return found.drift(names, None)
        if self._apart_since is None:  # the checksum that step s finds is what the update of step s - 1 has left
            agreed = [s for s in self._steps if 0 <= s < min(since)]
            self._apart_since = min(since) - 1, max(agreed, default=min(since) - 1)
        return found.drift(names, *self._apart_since)

    def equal(self) -> None:
        """They are, at the last :meth:`check`."""
        self._apart_since = None
