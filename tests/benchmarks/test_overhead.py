"""What benchmarks/overhead.py shows while it runs, and of a run that is interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_what_a_trace_adds_is_a_share_of_each_ranks_step() -> None:
    options = ["--part", "trace", "--framework", "ddp", "--length", "2", "--pairs", "3"]
    command = [sys.executable, str(ROOT / "benchmarks" / "overhead.py"), *options]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stderr
    rows = re.findall(r"│ +([01]) (.*│.*)", ended.stdout)
    assert [rank for rank, _ in rows] == ["0", "1"]
    numbers = [[float(one) for one in re.findall(r"\d+\.\d+", cells)] for _, cells in rows]
    for plain, plain_mean, *spent, share, share_mean in numbers:
        assert plain > 1.0 < plain_mean
        assert spent[0] > 0.0
        assert abs(share - 100.0 * sum(spent[::2]) / plain) < 0.1 + 0.05 * share
        assert abs(share_mean - 100.0 * sum(spent[1::2]) / plain_mean) < 0.1 + 0.05 * share_mean
    assert numbers[0][4] > 0.0  # rank 0 makes the lines
    assert numbers[1][4] == 0.0


@pytest.mark.long
def test_a_run_says_how_far_it_is_and_ctrl_c_ends_it_with_what_is_known() -> None:
    options = ["--framework", "ddp", "--length", "2", "--pairs", "100000", "--variant", "interval 10"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "overhead.py"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TQDM_MININTERVAL": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    late = Timer(250, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    assert process.stderr is not None
    said = b""
    while not re.search(rb"measuring.* [3-9]/100000", said) and (more := os.read(process.stderr.fileno(), 1 << 16)):
        said += more
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, rest = process.communicate()
    late.cancel()
    assert b"warming up: ds_silent, interval 10" in said
    assert b"noise floor" in said
    assert process.returncode == 130, rest.decode()
    assert b"Interrupted: that is what is known." in rest
    assert b"Traceback" not in said + rest
    table = out.decode()
    assert re.search(r"2 ranks x 1 thread, 20\.\d M parameters, fp32, ddp, .* pairs of steps", table)
    assert len(re.findall(r"(ds_silent, interval 10|plain again).*%.*%", table)) == 2


MIRRORED = """
import os, torch, torch.distributed as dist
import mirror
from ds_silent.preflight.comparison import EveryRank
mirror.register()
dist.init_process_group("mirror", store=dist.HashStore(), rank=0, world_size=8)
everybody = EveryRank(dist.group.WORLD, torch.device("cpu"), lambda act: act())
print(everybody.texts(["what one rank says", "and more"], [0, 0], 64))
gradient = torch.ones(3)
dist.all_reduce(gradient)
print(gradient.tolist())
"""


def test_one_of_mirrored_ranks_reads_what_it_says_itself() -> None:
    """A text travels as a sum to which the others add nothing; an observer that cannot read it ends."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        [sys.executable, "-c", MIRRORED], env=environment, capture_output=True, text=True, timeout=100
    )
    assert ended.stdout.splitlines() == ["['what one rank says', 'and more']", "[8.0, 8.0, 8.0]"], ended.stderr
