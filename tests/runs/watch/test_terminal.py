"""The live view in a terminal of its own: how it looks while files grow, and every way in which it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs.watch.runs import made, write

COMMAND = (sys.executable, "-c", "from ds_silent.cli import app; app()", "watch")
LIMIT = 60.0  # seconds, on a machine that is busy


class Terminal:
    """``ds-silent watch`` in a pseudo-terminal; ``output`` is all that it has sent."""

    def __init__(
        self,
        *arguments: object,
        columns: int = 80,
        rows: int = 24,
        interrupt: signal.Handlers = signal.SIG_DFL,
        term: str = "xterm-256color",
    ) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns, rows)
        self._before = termios.tcgetattr(theirs)
        self._theirs = theirs
        environment = {**os.environ, "TERM": term, "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
        environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}

        def start() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, interrupt)  # whatever the tests have inherited

        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True, preexec_fn=start,
        )  # fmt: skip
        self.output = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, shown: str | Callable[[str], bool], since: int = 0) -> str:
        """The output from ``since`` on, once it shows that."""
        test = shown if callable(shown) else lambda text: shown in text
        end = time.monotonic() + LIMIT
        while not test(self.output[since:]):
            assert time.monotonic() < end, f"not shown: {shown}; shown: {self.output[since:]!a}"
            self._read()
        return self.output[since:]

    def _read(self) -> None:
        if select.select([self._ours], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):
                self.output += os.read(self._ours, 1 << 16).decode("utf-8", errors="replace")

    def end(self) -> int:
        """The exit status; the terminal must be as it was before."""
        until = time.monotonic() + LIMIT
        while self.process.poll() is None:
            assert time.monotonic() < until
            self._read()
        self._read()
        assert termios.tcgetattr(self._theirs) == self._before
        assert self.output.rstrip().endswith("\x1b[?1049l"), self.output[-400:]  # and not a word behind it
        assert "Traceback" not in self.output
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for descriptor in (self._ours, self._theirs):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def opened() -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def opens(*arguments: object, **how: Any) -> Terminal:
        terminals.append(Terminal(*arguments, **how))
        return terminals[-1]

    yield opens
    for terminal in terminals:
        terminal.close()


RECORDS, EVENTS = made(ranks=4, steps=80, bad_from=40)


def test_a_run_that_grows_is_resized_and_left(tmp_path: Path, opened: Callable[..., Terminal]) -> None:
    terminal = opened(tmp_path, "--every", 0.2)
    terminal.until("This directory holds no records yet")
    write(tmp_path, RECORDS[:10])
    terminal.until("step 10")
    write(tmp_path, RECORDS[10:], EVENTS)
    terminal.until("is not like the others")
    since = len(terminal.output)
    terminal.resize(120, 40)
    shown = terminal.until(lambda text: any(one.count("\n") == 39 for one in text.split("\x1b[H")), since)
    assert "q quit" in shown.rpartition("\n")[2]  # the last line is where the terminal ends now
    since = len(terminal.output)
    terminal.press(b"e")
    terminal.until("newest first", since)
    terminal.press(b"e")
    os.truncate(tmp_path / "metrics.jsonl", 0)
    terminal.until("not measured", since)
    terminal.press(b"q")
    assert terminal.end() == 1


@pytest.mark.parametrize("interrupt", [signal.SIG_DFL, signal.SIG_IGN])  # a shell's job in the background ignores it
def test_ctrl_c(tmp_path: Path, opened: Callable[..., Terminal], interrupt: signal.Handlers) -> None:
    write(tmp_path, RECORDS, EVENTS)
    terminal = opened(tmp_path, interrupt=interrupt)
    terminal.until("is not like the others")
    terminal.press(b"\x03")
    assert terminal.end() == 130


def test_a_terminal_that_cannot_be_drawn_on_gets_text(tmp_path: Path, opened: Callable[..., Terminal]) -> None:
    write(tmp_path, RECORDS, EVENTS)
    terminal = opened(tmp_path, term="dumb")
    assert "\x1b" not in terminal.until("status: warning")
    assert terminal.process.wait(LIMIT) == 1


def test_an_end_from_outside(tmp_path: Path, opened: Callable[..., Terminal]) -> None:
    write(tmp_path, RECORDS, EVENTS)
    terminal = opened(tmp_path)
    terminal.until("is not like the others")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM


def test_a_file_system_that_hangs_does_not_stop_the_keys(tmp_path: Path, opened: Callable[..., Terminal]) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")  # to open it waits for a writer, who never comes
    terminal = opened(tmp_path)
    terminal.until("q quit")
    since = len(terminal.output)
    terminal.press(b"?")
    terminal.until("the exit status says", since)
    terminal.press(b"q")
    assert terminal.end() == 5


def test_records_send_no_escape_codes_of_their_own(tmp_path: Path, opened: Callable[..., Terminal]) -> None:
    write(tmp_path, RECORDS[:3])
    (tmp_path / "events.jsonl").write_text(
        '{"step": 3, "kind": "\\u001b]0;stolen\\u0007", "severity": "error", "ranks": [1], "where": null, '
        '"message": "\\u001b[2J\\u001b[31mred \\u009b5m", "remedy": "\\u001bc"}\n'
    )
    terminal = opened(tmp_path)
    terminal.until("red")
    terminal.press(b"e")
    terminal.until("ERROR")
    terminal.press(b"q")
    assert terminal.end() == 3
    ours = r"\x1b\[(\?1049[hl]|\?25[hl]|H|[\d;]*m)"
    assert re.sub(ours, "", terminal.output).replace("\r", "").replace("\n", "").isprintable()
    assert "\x1b[31mred" not in terminal.output


def test_a_terminal_that_is_gone(tmp_path: Path, opened: Callable[..., Terminal]) -> None:
    write(tmp_path, RECORDS, EVENTS)
    terminal = opened(tmp_path)
    terminal.until("is not like the others")
    os.close(terminal._ours)
    os.close(terminal._theirs)
    terminal.process.wait(LIMIT)
    assert terminal.process.returncode in (1, -signal.SIGHUP)


def test_a_closed_pipe(tmp_path: Path) -> None:
    write(tmp_path, RECORDS, EVENTS)
    reading, writing = os.pipe()
    process = subprocess.Popen([*COMMAND, str(tmp_path), "--json"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(reading)
    os.close(writing)
    _, said = process.communicate(timeout=LIMIT)
    assert (said, process.returncode) == ("", 1)
