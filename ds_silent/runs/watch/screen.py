"""A terminal that lines are drawn on: only those that have changed are sent.

with Screen(sys.stdout) as screen:
    columns, rows = screen.size()
    screen.show(lines)
"""

from __future__ import annotations

import contextlib
import shutil
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.text import Text

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
