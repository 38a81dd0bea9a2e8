"""Draw on a terminal and read its keys."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import time
from dataclasses import replace
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.text import Text

from ds_silent.runs.watch.drawing import SORTS, Wishes

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the other screen, without a cursor, empty
_LEAVE = "\x1b[?25h\x1b[?1049l"


class Screen:
    """The whole terminal, given back as it was."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._shown: list[str] = []
        self._size = (0, 0)

    def __enter__(self) -> Screen:
        self._send(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, ValueError):  # it may be gone
            self._send(_LEAVE)

    @staticmethod
    def size() -> tuple[int, int]:
        """Columns and rows, as they are now."""
        size = shutil.get_terminal_size()
        return size.columns, size.lines

    def show(self, lines: list[Text]) -> None:
        """These lines from the top on.

        Raises:
            OSError: the terminal is gone.
        """
        whole, self._size = self.size() != self._size, self.size()
        drawn = [self._ansi(line) for line in lines]
        changed = [
            f"\x1b[{row};1H\x1b[2K{line}"
            for row, line in enumerate(drawn, start=1)
            if whole or row > len(self._shown) or line != self._shown[row - 1]
        ]
        self._shown = drawn
        if changed:
            self._send(("\x1b[2J" if whole else "") + "".join(changed))

    def _ansi(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="")
        return captured.get()

    def _send(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


# ----------------------------------------------------------------------------------------------------------------------
# Keys as they are pressed, and what they change.


try:
    import termios
    import tty
except ImportError:  # no Unix terminal: it is drawn, and Ctrl-C ends it
    termios = tty = None  # type: ignore[assignment]

_SEQUENCES = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\x1b[5~": "page up",
    b"\x1b[6~": "page down", b"\x1b[H": "home", b"\x1b[F": "end", b"\x1bOH": "home", b"\x1bOF": "end",
    b"\x1b[1~": "home", b"\x1b[4~": "end",
}  # fmt: skip
_LETTERS = {"k": "up", "j": "down", "g": "home", "G": "end", " ": "page down"}
_AT_ONCE = 256


class Keyboard:
    """The keys of a terminal, without Return and without an echo; none where the input is no terminal."""

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
        """The keys that are pressed within this time, as soon as there is one; a terminal that is gone is "q"."""
        if self._before is None:
            time.sleep(seconds)
            return []
        descriptor = self._stream.fileno()
        if not select.select([descriptor], [], [], seconds)[0]:
            return []
        return keys_of(os.read(descriptor, _AT_ONCE)) or ["q"]


def keys_of(data: bytes) -> list[str]:
    """Names of the keys behind what a terminal has sent."""
    keys = []
    while data:
        found = next((sequence for sequence in _SEQUENCES if data.startswith(sequence)), None)
        if found:
            keys.append(_SEQUENCES[found])
            data = data[len(found) :]
        elif data.startswith(b"\x1b") and len(data) > 1:  # a key that means nothing here
            data = data[1:].lstrip(b"[O0123456789;")[1:]
            keys.append("")
        else:
            letter = chr(data[0])
            keys.append(_LETTERS.get(letter, letter))
            data = data[1:]
    return keys


def wished(wishes: Wishes, key: str, page: int, most: int) -> Wishes:
    """What is wished after this key.

    Args:
        page: lines that the keys for a page move.
        most: how far one can move down.
    """
    moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -wishes.scroll, "end": most}
    if key in moves:
        return replace(wishes, scroll=min(max(wishes.scroll + moves[key], 0), most))
    if key == "s":
        return replace(wishes, sort=SORTS[(SORTS.index(wishes.sort) + 1) % len(SORTS)], scroll=0)
    if key == "S":
        return replace(wishes, turned=not wishes.turned, scroll=0)
    if key == "h":
        return replace(wishes, hosts=not wishes.hosts, page="ranks", scroll=0)
    if key == "e":
        return replace(wishes, page="ranks" if wishes.page == "events" else "events", scroll=0)
    if key == "?":
        return replace(wishes, page="ranks" if wishes.page == "help" else "help", scroll=0)
    if key == "\x1b":
        return replace(wishes, page="ranks", scroll=0)
    return replace(wishes, paused=not wishes.paused) if key == "p" else wishes
