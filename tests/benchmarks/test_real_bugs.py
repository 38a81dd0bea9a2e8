"""Releases of DeepSpeed whose engine lacks what newer ones have: the known bug is told, a right release is silent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_silent.comparison.releases import ImpossibleError, laid_over

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["0.16.9", pytest.param("0.17.6", marks=pytest.mark.long)])
def test_of_an_old_release_of_deepspeed(version: str) -> None:
    try:
        laid_over(ROOT / "build" / "real-bugs" / version, (f"deepspeed=={version}",))
    except ImpossibleError as error:
        pytest.skip(str(error))
    command = [sys.executable, "benchmarks/real_bugs.py", "--versions", version, "--ranks", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all 2 as expected" in ended.stdout
