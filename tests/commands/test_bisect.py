"""Which release of a package parted: real trainings with releases of a package of our own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from ds_silent.commands.bisect import answer
from ds_silent.comparison import TrainingComparison
from ds_silent.comparison.releases import ImpossibleError, first_that_parts, releases_between
from tests.support.interpreter import interpreter

SCRIPT = """
import torch, toyrate
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=toyrate.RATE)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(6):
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
RELEASES = {"1.0": "0.1", "1.1": "0.1", "1.2": "1 / 0", "1.3": "0.11", "1.4": "0.11"}


@pytest.fixture
def toyrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of a package whose rate changes with 1.3; 1.2 does not run."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version, rate in RELEASES.items():
        about = f"toyrate-{version}.dist-info"
        with zipfile.ZipFile(wheels / f"toyrate-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("toyrate.py", f"RATE = {rate}\n")
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: toyrate\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


def bisect(tmp_path: Path, *arguments: str, training: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(sys.executable).with_name("ds-silent")), "bisect", *arguments]
    return subprocess.run(
        [*command, "--", *training],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )


@pytest.mark.long
def test_the_first_release_that_parts_is_named(toyrate: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [interpreter(), str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node", "2"]
    training = [*torchrun, "-m", "ds_silent", str(tmp_path / "train.py")]
    done = bisect(tmp_path, "toyrate", "--good", "1.0", "--bad", "1.4", "--json", "found.json", training=training)
    assert done.returncode == 1, done.stdout + done.stderr
    answer = next(line for line in done.stdout.splitlines() if "first release" in line)
    assert answer.startswith("toyrate 1.3 is the first release that parts from 1.0 (1 between could not run): ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["release"], found["last_alike"], found["step"], found["link"]) == ("1.3", "1.1", 1, "rates")
    log = tmp_path / "runs" / "bisect" / "toyrate" / "1.2" / "output.txt"
    why = "with toyrate 1.2 the training ended with status 1 (ZeroDivisionError: division by zero); see "
    assert found["skipped"] == {"1.2": f"{why}{log.relative_to(tmp_path)}"}
    assert f"toyrate 1.2: left out, {why}{log.relative_to(tmp_path)}" in done.stdout.splitlines()
    assert found["factor"] == pytest.approx(1.1, rel=1e-3)


LAUNCHER = """
import os, signal, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
def end(*_):
    time.sleep(1)
    rank.kill()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
open(sys.argv[1], "w").write(f"{os.getpid()} {rank.pid}")
time.sleep(300)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.long
def test_a_training_ends_with_the_search(toyrate: None, tmp_path: Path, number: signal.Signals, status: int) -> None:
    """The launcher ends its ranks when it is asked to, as torchrun does: they have sessions of their own."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    command = [sys.executable, str(Path(sys.executable).with_name("ds-silent")), "bisect", "toyrate", "--good", "1.0"]
    training = [interpreter(), "launcher.py", "started"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [*command, "--bad", "1.4", "--", *training],
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
        # a suite in a shell's background is started with ctrl-C ignored, which a process would inherit
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as search:
        deadline = time.monotonic() + 120
        while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
            assert time.monotonic() < deadline
            assert search.poll() is None
            time.sleep(0.1)
        os.killpg(search.pid, number)  # as a terminal does: to all of its group
        assert search.wait(60) == status
    pids = (tmp_path / "started").read_text().split()
    assert [pid for pid in pids if Path("/proc", pid).exists() and b"Z" not in state(pid)] == []


def state(pid: str) -> bytes:
    return Path("/proc", pid, "stat").read_bytes().rpartition(b")")[2].split()[0]


@pytest.mark.long
def test_the_lock_of_a_build_that_was_killed_is_removed(toyrate: None, tmp_path: Path) -> None:
    lock = tmp_path / "runs" / "bisect" / "toyrate" / "1.0" / "extensions" / "operator" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    program = "import os, pathlib, sys; sys.exit(any(pathlib.Path(os.environ['TORCH_EXTENSIONS_DIR']).rglob('lock')))"
    done = bisect(tmp_path, "toyrate", "--good", "1.0", "--bad", "1.4", training=[interpreter(), "-c", program])
    assert "with toyrate 1.0 the training left no trace" in done.stderr
    assert not lock.exists()


def test_none_parts() -> None:
    found = first_that_parts(["1.0", "1.1"], lambda _: TrainingComparison(False, None, None, None, None, None, ()))
    assert (found.first, found.last_alike) == (None, "1.1")
    assert answer("toyrate", "1.0", found) == "toyrate 1.0 to 1.1 do not part."


@pytest.mark.long
def test_a_mistake_is_one_sentence(toyrate: None, tmp_path: Path) -> None:
    for arguments, told in (
        (("--good", "1.0", "--bad", "7.0"), "pip knows no toyrate 7.0"),
        (("--good", "1.4", "--bad", "1.0"), "--good 1.4 must be older"),
        (("--good", "1.2", "--bad", "1.4"), "with toyrate 1.2 the training ended with status 1"),
        (("--good", "1.0", "--bad", "1.4"), "with toyrate 1.0 the training left no trace"),
    ):
        done = bisect(tmp_path, "toyrate", *arguments, training=[interpreter(), "-c", "import toyrate"])
        assert done.returncode == 2
        assert told in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_releases_are_those_between(toyrate: None) -> None:
    assert releases_between("toyrate", "1.1", "1.4") == ["1.1", "1.2", "1.3", "1.4"]


@pytest.mark.parametrize("first", range(1, 12))
@pytest.mark.parametrize("broken", [set(), {3, 4}, {1, 2, 5, 8}])
def test_the_search_is_right_wherever_the_first_is(first: int, broken: set[int]) -> None:
    releases, tried = [str(number) for number in range(12)], []

    def compared(release: str) -> TrainingComparison:
        tried.append(release)
        if int(release) in broken:
            raise ImpossibleError("broken")
        parts = int(release) >= first
        return TrainingComparison(parts, 1 if parts else None, None, "rates" if parts else None, None, "x", ())

    found = first_that_parts(releases, compared)
    runs = [number for number in range(first, 12) if number not in broken]
    assert found.first == str(runs[0])
    assert found.last_alike == str(max(number for number in range(first) if number not in broken))
    assert len(tried) <= 5 + len(broken)
    assert len(tried) == len(set(tried))
