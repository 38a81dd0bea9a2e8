"""Under which autocast a rank's training forwards run: on or off, and the dtype.

    autocast = Autocast()
    autocast.connect(patches, guard.local)   # sees what is entered inside a forward
    autocast.before_forward("cpu"); autocast.after_forward()
    autocast.state                              # ("off",), ("bfloat16",): every state since it was asked last

A script enters autocast around the forward, and so it is on when the forward begins. A trainer or a model may enter it
within: there the first one counts that switches it on, because a later one may depend on the rows. In a compiled model
nobody enters it but who traces it, once and again as shapes change: then only what is on as the forward begins counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ds_silent.patches import Patches

_TRACES = (
    "_enter_autocast"  # of torch.amp.autocast_mode (2.4 to 2.13): what torch.compile calls, and puts into its code
)


class Autocast:
    """The states of one rank's forwards."""

    def __init__(self) -> None:
        self._device = ""  # of the forward under way; empty outside of one
        self._found: dict[str, None] = {}
        self._now: str | None = None
        self._last: tuple[str, ...] = ()
        self._traced = False

    @property
    def state(self) -> tuple[str, ...]:
        """Every state of the forwards since the last call, sorted; where there was none, those of before."""
        if self._found:
            self._last, self._found = tuple(sorted(self._found)), {}
        return self._last

    def connect(self, patches: Patches, alone: Callable[..., object]) -> None:
        """Listen to what is entered; ``alone``: the guard of :mod:`ds_silent.distributed.guard`."""
        patches.behind_method(torch.autocast, "__enter__", partial(alone, self._entered))

    def before_forward(self, device: str) -> None:
        """A training forward on this type of device begins."""
        self._device, self._now = device, _state(device)

    def after_forward(self) -> None:
        """It has ended."""
        if self._device:
            self._found[self._now or "off"] = None
            self._device = ""

    def _entered(self, caller: str) -> None:
        self._traced = self._traced or caller == _TRACES
        if self._device and self._now is None and not self._traced:
            self._now = _state(self._device)


def _state(device: str) -> str | None:
    """The dtype; None where it is off, or this type of device has no autocast."""
    try:
        enabled = torch.is_autocast_enabled(device)
        return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if enabled else None
    except RuntimeError:
        return None
