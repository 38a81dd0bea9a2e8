"""Tell what each rank holds of its own in health from what is to be equal: buffers, and optimizers' states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_silent.kernels.checksums import Bits, Items, combined

BUFFER, STATE = "buffer ", "optimizer "
"""How the name of a buffer begins, and that of an optimizer's state."""


class OwnStates:
    """Tell states that an optimizer deals to the ranks from one that has gone wrong.

    Muon keeps a matrix's momentum on the rank that updates it, and the weights stay equal. A state that has gone wrong
    parts them with the next update. So where states alone differ, the weights are compared once more behind an update.

    Attributes:
        waits: states alone differed at the last comparison.
    """

    def __init__(self) -> None:
        self.waits = self._left_out = False

    def compared(self, others: Items) -> Items:
        """Return what is compared."""
        return [item for item in others if not (self._left_out and item[0].startswith(STATE))]

    def apart(
        self, names: Sequence[str], values: Tensor, same_on_all: Callable[[Tensor], Tensor]
    ) -> tuple[str, ...] | None:
        """Return names of states, which are compared no more, if they alone differ for the second time; none at first.

        None where something else differs. A collective.
        """
        places = [place for place, name in enumerate(names) if not name.startswith(STATE)]
        whole = combined(values[places])
        alone = bool(same_on_all(torch.stack((whole, torch.full_like(whole, len(places))))).all())
        self.waits, again = alone, alone and self.waits
        if not alone:
            return None
        self._left_out = again
        states = dict.fromkeys(name.rpartition(" ")[0] for name in names if name.startswith(STATE))
        return (tuple(states) or (STATE.strip(),)) if again else ()


class OwnBuffers:
    """Tell buffers that each rank's forwards write by its own rows from those that are to be equal.

    Running statistics of the script's own, the observers of a quantisation, a counter of tokens: they differ in health
    and move. What differs and stands still does not, nor what moves and is equal.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.zeros(1, dtype=torch.int64, device=device)  # checksums at the first look, behind a 0
        self._places: dict[str, int] | None = None  # of these
        self._seen: dict[str, tuple[int, int]] = {}  # the tensor and its version at the last look
        self._moving: set[str] = set()  # by their versions; a compiled kernel may write without counting
        self._own: set[str] = set()

    def look(self, others: Items) -> bool:
        """Look which have moved since the last look; return whether a first one has."""
        before, buffers = bool(self._moving), [item for item in others if item[0].startswith(BUFFER)]
        if self._places is None:
            self._places = {name: place for place, (name, _) in enumerate(buffers, 1)}
            self._first = torch.cat((self._first, Bits(self._first.device)(buffers))) if buffers else self._first
        for name, tensor in buffers:
            now = id(tensor), -1 if tensor.is_inference() else tensor._version
            if self._seen.setdefault(name, now) != now:
                self._moving.add(name)
            self._seen[name] = now
        return bool(self._moving) and not before

    def compared(self, others: Items) -> Items:
        """Return what is compared; look at it."""
        self.look(others)
        return [item for item in others if item[0] not in self._own]

    def leave_out(
        self, apart: Sequence[str], values: Tensor, same_on_all: Callable[[Tensor], Tensor]
    ) -> tuple[str, ...]:
        """Leave out from now on what is ``apart``, with these checksums, and moves on every rank; return it.

        A collective.
        """
        if self._places is None or not any(name.startswith(BUFFER) for name in apart):
            return ()
        places = torch.tensor([self._places.get(name, 0) for name in apart], device=values.device)
        moving = torch.tensor([name in self._moving for name in apart], device=values.device)
        moves = moving | ((places > 0) & (values != self._first[places]))
        agreed = (same_on_all(moves.long()) & moves.cpu()).tolist()
        own = tuple(name for name, both in zip(apart, agreed, strict=True) if both)
        self._own.update(own)
        return own
