"""Released packages laid over an environment: each in a folder of its own, put before its packages by PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


class ImpossibleError(Exception):
    """What this machine cannot have; the message says why."""


def pip_install(python: Path | str, *arguments: str) -> None:
    """Raises ImpossibleError with pip's last word."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    variables = {**os.environ, "DS_ACCELERATOR": "cpu"}  # DeepSpeed's setup asks which operators to build
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if ended.returncode:
        told = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")] or ended.stderr.splitlines()
        raise ImpossibleError(f"pip cannot install {' '.join(arguments[-4:])}: {' '.join(told[-1:])}")


def laid_over(folder: Path, requirements: tuple[str, ...], python: Path | str = sys.executable) -> Path:
    """``folder`` with these packages in it, without what they depend on; made on first use, whole or not at all."""
    ready = folder / "ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip_install(python, "--no-deps", "--no-build-isolation", "--target", str(folder), *requirements)
        ready.touch()
    return folder
