"""The live view: a thread reads, this one draws and listens to the keys.

    view = look(Watched("runs/my-run"), "runs/my-run", every=1.0)      # until q or Ctrl-C

However long a file system takes, the picture and the keys do not wait for it; and what cannot be read is a line of the
picture, never an end of it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from ds_silent.runs.watch.drawing import Glyphs, Wishes, draw, glyphs_for, most_scroll
from ds_silent.runs.watch.terminal import Keyboard, Screen, wished
from ds_silent.runs.watch.watched import View, Watched

TICK = 0.5
"""Seconds after which the size of the terminal is looked at again."""
REDRAW = 1.0
"""Seconds between two pictures where no key is pressed."""


class Following(threading.Thread):
    """Reads a run every so many seconds; whoever draws takes the newest view.

    Args:
        every: seconds.
        heard: called in this thread with every view, as soon as it is there.
        caught_up: called likewise where all that there is has been read.
    """

    def __init__(
        self,
        watched: Watched,
        every: float,
        heard: Callable[[View], None] = lambda view: None,
        caught_up: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="ds_silent watch reads", daemon=True)  # a read that hangs must not keep the process
        self._watched, self._every, self._heard, self._caught_up = watched, every, heard, caught_up
        self._left = threading.Event()
        self._view: View | None = None

    @property
    def view(self) -> View | None:
        """The newest; None before the first."""
        return self._view

    def run(self) -> None:
        """Until :meth:`leave`."""
        while not self._left.is_set():
            more = self._watched.poll()
            view = self._watched.view()
            self._view = view
            self._heard(view)
            if not more:
                self._caught_up()
            self._left.wait(0.0 if more else self._every)

    def leave(self) -> None:
        """Read no more; does not wait for a read that is under way."""
        self._left.set()


def look(watched: Watched, name: str, every: float, caught_up: Callable[[], None] = lambda: None) -> View:
    """Draw until somebody presses q, or the terminal is gone.

    Returns:
        the newest view.

    Raises:
        KeyboardInterrupt: Ctrl-C; the terminal is as it was before.
        SystemExit: SIGTERM; likewise.
    """
    following = Following(watched, every, caught_up=caught_up)
    before = signal.signal(signal.SIGTERM, _end)
    # A shell that starts a job in the background has its commands ignore SIGINT, and children inherit that.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    glyphs = glyphs_for(sys.stdout.encoding)
    nothing = View(run=name, verdict="reading ...")
    following.start()
    try:
        with Keyboard(sys.stdin) as keyboard, Screen(sys.stdout) as screen:
            _draw_until_left(following, keyboard, screen, glyphs, nothing)
    except OSError:  # of the terminal: all others are lines of the picture
        silence_stdout()
    finally:
        following.leave()
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
    return following.view or nothing


def follow(watched: Watched, every: float, caught_up: Callable[[], None]) -> None:
    """Read without a picture until this process is ended: for who wants the alerts of a run only.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        SystemExit: SIGTERM.
    """
    signal.signal(signal.SIGTERM, _end)
    following = Following(watched, every, caught_up=caught_up)
    following.start()
    while following.is_alive():
        following.join(TICK)


def _draw_until_left(following: Following, keyboard: Keyboard, screen: Screen, glyphs: Glyphs, view: View) -> None:
    wishes, drawn_at, size = Wishes(), 0.0, (0, 0)
    while True:
        fresh = following.view
        if fresh is not None and not wishes.paused:
            waited, view = view.verdict == "reading ...", fresh
            drawn_at = 0.0 if waited else drawn_at
        if time.monotonic() - drawn_at >= REDRAW or screen.size() != size:
            drawn_at, size = time.monotonic(), screen.size()
            screen.show(draw(view, wishes, *size, glyphs, time.time()))
        for key in keyboard.wait(TICK):
            if key in ("q", "Q", "\x04"):
                return
            wishes = wished(wishes, key, max(size[1] // 2, 1), most_scroll(view, wishes))
            drawn_at = 0.0


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def silence_stdout() -> None:
    """Whoever has read the output is gone: what Python still flushes at its end goes nowhere, without a word."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)
