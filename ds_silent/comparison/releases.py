"""Find the release of a package from which on a training parts from what it was.

    found = first_that_parts(["0.16.9", "0.17.0", "0.18.0"], train_and_compare)
    folder = laid_over(Path("build/releases/deepspeed-0.17.0"), ("deepspeed==0.17.0",))

Each release is installed into a folder of its own, without what it depends on, and put before the environment's
packages by PYTHONPATH: the environment itself stays as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_silent.comparison.result import TrainingComparison


class ImpossibleError(Exception):
    """What this machine cannot have or run; the message says why."""


@dataclass
class Bisection:
    """What each release that was tried has done, against the oldest.

    Attributes:
        first: the oldest release known to part; None where the newest does not.
        last_alike: the newest release before it that is known not to.
        comparisons: of each release that ran.
        skipped: why others did not.
    """

    first: str | None = None
    last_alike: str = ""
    comparisons: dict[str, TrainingComparison] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def first_that_parts(releases: Sequence[str], compared: Callable[[str], TrainingComparison]) -> Bisection:
    """Search by halves, as ``git bisect`` does; a release that cannot run is left out.

    Args:
        releases: from the one that is right to the one that is not.
        compared: trains with a release and compares that with the first one's training.

    Raises:
        ImpossibleError: the first or the last release cannot run.
    """
    found = Bisection(last_alike=releases[0])
    found.comparisons[releases[-1]] = compared(releases[-1])
    if not found.comparisons[releases[-1]].parted:
        found.last_alike = releases[-1]
        return found
    alike, parts = 0, len(releases) - 1
    while True:
        left = [place for place in range(alike + 1, parts) if releases[place] not in found.skipped]
        if not left:
            found.first, found.last_alike = releases[parts], releases[alike]
            return found
        place = left[len(left) // 2]
        try:
            one = found.comparisons[releases[place]] = compared(releases[place])
        except ImpossibleError as error:
            found.skipped[releases[place]] = str(error)
            continue
        alike, parts = (alike, place) if one.parted else (place, parts)


def pip(*arguments: str, python: Path | str = sys.executable) -> str:
    """Run pip and return what it prints; ImpossibleError with pip's last word."""
    command = [str(python), "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    variables = {**os.environ, "DS_ACCELERATOR": "cpu"}  # DeepSpeed's setup asks which operators to build
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if ended.returncode:
        told = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")] or ended.stderr.splitlines()
        raise ImpossibleError(f"pip {arguments[0]} {arguments[-1]} failed: {' '.join(told[-1:])}")
    return ended.stdout


def pip_install(python: Path | str, *arguments: str) -> None:
    """Install with another environment's pip."""
    pip("install", "--quiet", *arguments, python=python)


def laid_over(folder: Path, requirements: tuple[str, ...], python: Path | str = sys.executable) -> Path:
    """Return ``folder`` with these packages in it, without what they depend on; made on first use, whole or not at all.

    Raises ImpossibleError where pip cannot install them.
    """
    ready = folder / "ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip_install(python, "--no-deps", "--no-build-isolation", "--target", str(folder), *requirements)
        ready.touch()
    return folder


def releases_between(package: str, good: str, bad: str) -> list[str]:
    """Return the released versions from ``good`` to ``bad``, without pre-releases that were not named, oldest first.

    Raises ImpossibleError where pip does not know one of them, or ``good`` is not the older one.
    """
    told = re.search(r"^Available versions: (.*)$", pip("index", "versions", package), re.MULTILINE)
    known = [] if told is None else [version.strip() for version in told.group(1).split(",")][::-1]
    for version in (good, bad):
        if version not in known:
            raise ImpossibleError(f"pip knows no {package} {version}; it knows {', '.join(known[-8:]) or 'none'}")
    places = known.index(good), known.index(bad)
    if places[0] >= places[1]:
        raise ImpossibleError(f"--good {good} must be older than --bad {bad}")
    return known[places[0] : places[1] + 1]
