"""Which release of a package parted: real trainings with releases of a package of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
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
    assert list(found["skipped"]) == ["1.2"]
    assert found["factor"] == pytest.approx(1.1, rel=1e-3)


def test_none_parts() -> None:
    found = first_that_parts(["1.0", "1.1"], lambda _: TrainingComparison(False, None, None, None, None, None, ()))
    assert (found.first, found.last_alike) == (None, "1.1")
    assert answer("toyrate", "1.0", found) == "toyrate 1.0 to 1.1 do not part."


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
