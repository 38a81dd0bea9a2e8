"""The live view: a thread reads, this one draws and listens to the keys.

    snapshot = look(Watched("runs/my-run"), "runs/my-run", every=1.0)      # until q or Ctrl-C

However long a file system takes, the picture and the keys do not wait for it; a file that cannot be read is a line of
the picture.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live

from ds_silent.runs.watch.screen import ScreenState, draw, glyphs_for, most_scroll
from ds_silent.runs.watch.watched import Snapshot, Watched

try:
    import termios
    import tty
except ImportError:  # not a Unix terminal: it is drawn, and Ctrl-C ends it
    termios = tty = None  # type: ignore[assignment]

TICK = 0.5
"""Seconds between two looks at the terminal's size."""
REDRAW = 1.0
"""Seconds between two pictures where no key is pressed."""
_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", " ": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home", "g": "home",
    "\x1b[F": "end", "\x1bOF": "end", "\x1b[4~": "end", "G": "end",
}  # fmt: skip
_KEY = re.compile(r"\x1b[\[O\d;]*.?|.", re.DOTALL)


class Following(threading.Thread):
    """Reads a run every so many seconds; ``snapshot`` is the newest, None before the first.

    ``caught_up`` is called in this thread after a snapshot of everything that there is.
    """

    def __init__(self, watched: Watched, every: float, caught_up: Callable[[], None] = lambda: None) -> None:
        super().__init__(name="ds_silent watch reads", daemon=True)  # a read that hangs must not keep the process
        self._watched, self._every, self._caught_up = watched, every, caught_up
        self._left = threading.Event()
        self.snapshot: Snapshot | None = None

    def run(self) -> None:
        """Read until :meth:`leave`."""
        while not self._left.is_set():
            more = self._watched.poll()
            self.snapshot = self._watched.snapshot()
            if not more:
                self._caught_up()
            self._left.wait(0.0 if more else self._every)

    def leave(self) -> None:
        """Stop reading; does not wait for a read in progress."""
        self._left.set()


def can_draw() -> bool:
    """Return whether the output is a terminal on which lines can be drawn at their places."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def look(watched: Watched, name: str, every: float, caught_up: Callable[[], None] = lambda: None) -> Snapshot:
    """Draw until the user presses q or the terminal is gone; return the newest snapshot.

    Raises:
        KeyboardInterrupt: Ctrl-C; the terminal is as it was before.
        SystemExit: SIGTERM; likewise.
    """
    following = Following(watched, every, caught_up)
    before = signal.signal(signal.SIGTERM, _end)
    # A shell that starts a job in the background has its commands ignore SIGINT, and children inherit that.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = Snapshot(run=name, verdict="reading ...")
    console = Console(force_terminal=True, force_interactive=True, highlight=False, markup=False, emoji=False)
    following.start()
    try:
        with (
            Keyboard(sys.stdin) as keyboard,
            Live(
                console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            ) as live,
        ):
            _draw_until_left(following, keyboard, live, nothing)
    except OSError:  # of the terminal: all others are lines of the picture
        silence_stdout()
    finally:
        following.leave()
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
    return following.snapshot or nothing


def follow(watched: Watched, every: float, caught_up: Callable[[], None]) -> None:
    """Read without a picture until this process is ended, by Ctrl-C (KeyboardInterrupt) or SIGTERM (SystemExit)."""
    signal.signal(signal.SIGTERM, _end)
    following = Following(watched, every, caught_up)
    following.start()
    while following.is_alive():
        following.join(TICK)


def _draw_until_left(following: Following, keyboard: Keyboard, live: Live, view: Snapshot) -> None:
    state, glyphs, drawn_at, size = ScreenState(), glyphs_for(sys.stdout.encoding), 0.0, (0, 0)
    while True:
        fresh = following.snapshot
        if fresh is not None and not state.paused:
            waited, view = view.verdict == "reading ...", fresh
            drawn_at = 0.0 if waited else drawn_at
        if time.monotonic() - drawn_at >= REDRAW or live.console.size != size:
            drawn_at, size = time.monotonic(), live.console.size
            live.update(Group(*draw(view, state, *size, glyphs, time.time())), refresh=True)
        for key in keyboard.wait(TICK):
            if key in ("q", "Q", "\x04"):
                return
            state = state.after(key, max(size[1] // 2, 1), most_scroll(view, state))
            drawn_at = 0.0


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def silence_stdout() -> None:
    """Send what Python still flushes at its end nowhere: the reader of the output is gone."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)


class Keyboard:
    """The keys of a terminal, without Return and without an echo; none where the input is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._before: list[object] | None = None

    def __enter__(self) -> Keyboard:
        if termios is not None and self._stream.isatty():
            self._before = termios.tcgetattr(self._stream)
            tty.setcbreak(self._stream)
            now = termios.tcgetattr(self._stream)
            now[6][termios.VSUSP] = b"\0"  # stopped in the middle, it would leave the terminal as it is
            termios.tcsetattr(self._stream, termios.TCSADRAIN, now)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._stream, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> list[str]:
        """Return the keys that are pressed within this time, as soon as there is one; "q" if the terminal is gone."""
        if self._before is None:
            time.sleep(seconds)
            return []
        descriptor = self._stream.fileno()
        if not select.select([descriptor], [], [], seconds)[0]:
            return []
        return keys_of(os.read(descriptor, 256)) or ["q"]


def keys_of(data: bytes) -> list[str]:
    """Return the names of the keys behind what a terminal has sent; "" for one that means nothing here."""
    return [_KEYS.get(key, key if len(key) == 1 else "") for key in _KEY.findall(data.decode("latin-1"))]
