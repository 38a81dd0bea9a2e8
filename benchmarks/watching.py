"""What ``ds-silent watch`` takes of a core while a run writes 10 records a second.

    python benchmarks/watching.py --ranks 64 --seconds 60

Writes a made run through the real sinks, shows it in a pseudo-terminal of 80 x 24 and asks the system for the CPU time.
"""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_silent.records import Seconds
from ds_silent.sinks import open_files
from tests.support.made_records import NOTHING, Run


def write(directory: Path, ranks: int, before: int, rate: float, left: threading.Event) -> None:
    """``before`` steps at once, then ``rate`` a second; rank 2 goes wrong in the middle of what was before."""
    run, files = Run(ranks), open_files(directory, tensorboard=False)
    step = 0
    while not left.is_set():
        step += 1
        record = run.record(scale=3.0 if step > before // 2 else 1.0)
        files.write(replace(record, seconds=Seconds(1 / rate, 0.002)))
        for event in run.judge.step(record, NOTHING):
            files.write_event(event)
        if step > before:
            left.wait(1 / rate)
    files.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--before", type=int, default=2000, help="steps that are there already")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=10.0, help="steps a second")
    chosen = parser.parse_args()
    left = threading.Event()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        writer = threading.Thread(target=write, args=(directory, chosen.ranks, chosen.before, chosen.rate, left))
        writer.start()
        ours, theirs = pty.openpty()
        threading.Thread(target=_drain, args=(ours,), daemon=True).start()
        command = [sys.executable, "-c", "from ds_silent.cli import app; app()", "watch", name]
        environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
        watch = subprocess.Popen(command, stdin=theirs, stdout=theirs, env=environment)
        time.sleep(10.0)  # what was there before is read
        process = psutil.Process(watch.pid)
        began, before = time.monotonic(), process.cpu_times()
        time.sleep(chosen.seconds)
        after, seconds, memory = process.cpu_times(), time.monotonic() - began, process.memory_info().rss
        watch.terminate()
        watch.wait()
        left.set()
        writer.join()
        used = after.user + after.system - before.user - before.system
        share = f"{used / seconds:.2%} of a core over {seconds:.0f} s, {memory / 2**20:.0f} MiB"
        print(f"{chosen.ranks} ranks, {chosen.rate:g} steps/s: {share}")


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except OSError:
        pass


if __name__ == "__main__":
    main()
