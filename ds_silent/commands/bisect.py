"""``ds-silent bisect PACKAGE -- COMMAND``: which release parted, at which step and link."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_silent.commands.compare_runs import PARTED, TOGETHER
from ds_silent.commands.measuring import write_json
from ds_silent.comparison import ComparisonError, TraceError, TrainingComparison, compare
from ds_silent.comparison.output import say
from ds_silent.comparison.releases import Bisection, ImpossibleError, first_that_parts, laid_over, releases_between
from ds_silent.config import BLOCK, ConfigError
from ds_silent.config.block_file import load_ds_config
from ds_silent.integrations import BLOCK_FILE
from ds_silent.json_form import to_json
from ds_silent.text import mistake, one_line, printable, shortened, unwritten

PLACE = "{output_dir}"
"""In the command's arguments, it stands for the directory of this release's records."""
LONGEST = 160
"""Characters of a training's error that are said."""
ENDS = 60.0
"""Seconds that a training has to end its ranks in, when it is asked to."""
ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Exit)\b: .+)$", re.MULTILINE)


def bisect_command(
    package: str,
    command: Sequence[str],
    good: str,
    bad: str,
    versions: Sequence[str],
    directory: str,
    tolerance: float | None,
    json_path: str | None,
) -> int:
    """Train with one release after the other, and print which is the first that parts; ``versions``: empty for all."""
    try:
        releases = [good, *(version for version in versions if version not in (good, bad)), bad]
        if not versions:
            releases = releases_between(package, good, bad)
        if not command:
            raise ImpossibleError(
                "name the training behind --, as: -- torchrun --nproc_per_node 2 -m ds_silent train.py"
            )
        train = partial(_train, package, Path(directory) / package, command, _block())
        console = Console(highlight=False)
        say(console, f"{package} {good}: trains")
        right = train(good)

        def compared(release: str) -> TrainingComparison:
            try:
                one = compare(right, train(release), tolerance=tolerance)
            except ImpossibleError as error:
                if release != bad:  # whose error ends the search, and is its answer
                    say(console, f"{package} {release}: left out, {error}")
                raise
            say(console, f"{package} {release}: {one.sentence}")
            return one

        found = first_that_parts(releases, compared)
        _print_found(package, good, releases, found, console)
        write_json(json_path, to_json(_as_json(package, found)))
    except (ImpossibleError, ComparisonError, TraceError, ConfigError) as error:
        return mistake(printable(one_line(str(error))))
    except OSError as error:
        return unwritten(error)
    return TOGETHER if found.first is None else PARTED


def answer(package: str, good: str, found: Bisection) -> str:
    """Return the sentence that says which release parts."""
    if found.first is None:
        return f"{package} {good} to {found.last_alike} do not part."
    between = f" ({len(found.skipped)} between could not run)" if found.skipped else ""
    where = found.comparisons[found.first].sentence
    return f"{package} {found.first} is the first release that parts from {good}{between}: {where}"


def _block() -> dict[str, Any]:
    """Return the block that the environment names, with what a comparison needs."""
    file = os.environ.get(BLOCK_FILE)
    held = load_ds_config(file, BLOCK_FILE) if file else {}
    block = held.get(BLOCK, held)
    return {"tensorboard": False, "trace": {}, **block}


def _train(package: str, directory: Path, command: Sequence[str], block: dict[str, Any], release: str) -> Path:
    """Train with a release in its place; return the directory of the records.

    Raises:
        ImpossibleError: it cannot be installed, or the training fails or leaves no trace.
    """
    folder = laid_over((directory / "releases" / release).absolute(), (f"{package}=={release}",))
    run = directory / release
    run.mkdir(parents=True, exist_ok=True)
    for old in run.glob("*.jsonl"):
        old.unlink()
    file, log = run / "block.json", run / "output.txt"
    file.write_text(json.dumps({BLOCK: {**block, "output_dir": str(run.absolute())}}), encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    built = run.absolute() / "extensions"  # what another release has built is not this one's
    for lock in built.rglob("lock"):  # of a build that was killed, for which torch would wait for ever
        lock.unlink()
    variables = {**os.environ, "PYTHONPATH": path, "TORCH_EXTENSIONS_DIR": str(built), BLOCK_FILE: str(file.absolute())}
    with log.open("wb") as output:
        try:
            status = _run([word.replace(PLACE, str(run.absolute())) for word in command], variables, output)
        except OSError as error:
            raise ImpossibleError(f"{command[0]!a} cannot be started ({error.strerror}); check the command") from None
    if status:
        why = f"with {package} {release} the training ended with status {status}"
        raise ImpossibleError(f"{why}{_last_error(log)}; see {log}")
    if not (run / "trace.jsonl").exists():
        raise ImpossibleError(
            f"with {package} {release} the training left no trace in {run}; start it by -m ds_silent, or give its "
            f'block "output_dir": "{PLACE}" by an argument, and "trace": {{}}'
        )
    return run


def _run(command: Sequence[str], variables: Mapping[str, str], output: IO[bytes]) -> int:
    """Run a training and return its exit status; it does not outlive this process, whatever ends that.

    It has a session of its own: a launcher is asked once to end its ranks, and waited for. One that is killed, or
    asked twice, leaves them behind.
    """
    process = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        with _signals_raise():
            return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(ENDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise SystemExit for the signals that else end this process without a word."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_error(log: Path) -> str:
    """Return the last exception that a training's output names, but for the launcher's own."""
    found = [one for one in ERROR.findall(log.read_text(errors="replace")) if "ChildFailedError" not in one]
    return f" ({shortened(found[-1], LONGEST)})" if found else ""


def _as_json(package: str, found: Bisection) -> dict[str, Any]:
    first = None if found.first is None else found.comparisons[found.first]
    return {
        "package": package,
        "parted": found.first is not None,
        "release": found.first,
        "last_alike": found.last_alike,
        **{key: getattr(first, key, None) for key in ("step", "layer", "link", "factor", "cause")},
        "skipped": found.skipped,
        "releases": {release: one.sentence for release, one in found.comparisons.items()},
    }


def _print_found(package: str, good: str, releases: Sequence[str], found: Bisection, console: Console) -> None:
    say(console, answer(package, good, found))
    table = Table()
    for title in ("release", "step", "link", "layer"):
        table.add_column(title)
    for release in releases:
        one = found.comparisons.get(release)
        if release in found.skipped:
            table.add_row(release, "could not run")
        elif one is not None and one.parted:
            table.add_row(release, str(one.step), one.link, Text(printable(one.layer or "")))
        elif one is not None or release == good:
            table.add_row(release, "alike" if release != good else "the yardstick")
    console.print(table)
