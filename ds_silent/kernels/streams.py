"""Memory that is used on several streams of a device, in the order in which the host asks for it.

    order = stream_order(device)         # None where there are no streams
    if order is not None: order.enter()  # ahead of every use, in hooks and where results are read

Autograd calls a hook on the stream of the operation whose gradient it brings, and these may be several. What one use
has queued is complete before another stream's use begins, because that stream waits for it; the host never does. As
long as everything happens on one stream, as it commonly does, an entry is one comparison.

Each use waits for the one before, so the last waits for all. Gradients need no more: autograd itself tells the
allocator on which stream a hook is given them, and none is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StreamOrder:
    """See the module docstring.

    Args:
        current_stream: gives the calling thread's stream, which compares by ``!=`` and has ``wait_stream(other)``.
    """

    def __init__(self, current_stream: Callable[[], Any]):
        self._current_stream = current_stream
        self._last: Any = None

    def enter(self) -> None:
        """What the current stream does from here on comes after all earlier uses."""
        current = self._current_stream()
        if self._last is not None and current != self._last:
            current.wait_stream(self._last)
        self._last = current


def stream_order(device: torch.device) -> StreamOrder | None:
    """For memory on a device; None on the CPU, where everything is in order."""
    if device.type in ("cpu", "meta"):
        return None
    return StreamOrder(getattr(torch, device.type).current_stream)
