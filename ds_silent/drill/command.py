"""``ds-silent drill``: from what was typed to an exit code. 0 all found, 1 not all, 2 a mistake of the user."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

from rich.console import Console
from rich.progress import Progress

from ds_silent.commands.json_file import refuse_unwritable, write_json
from ds_silent.config import ConfigError
from ds_silent.drill.deepspeed.setting import Dtype
from ds_silent.drill.program import LONGEST, DrillOptions, Outcome, RankBroke, exit_code, run_drill, to_json
from ds_silent.drill.report import print_list, print_report

USER_MISTAKE = 2
WIDTH = 120  # of what goes into a file or a pipe


def drill_command(
    config: str | None,
    faults: Sequence[str],
    list_faults: bool,
    ranks: int,
    rank: int,
    steps: int | None,
    stage: int | None,
    dtype: str | None,
    json_path: str | None,
) -> int:
    """Runs the drill and prints its report on standard output; a mistake is one sentence on standard error."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    if list_faults:
        print_list(console)
        return 0
    try:
        if dtype not in (None, "fp32", "bf16"):
            raise ConfigError(f"--dtype must be fp32 or bf16, got {dtype!a}")
        refuse_unwritable(json_path)
        options = DrillOptions(
            config, tuple(faults), ranks, rank, LONGEST if steps is None else steps, stage, cast("Dtype | None", dtype)
        )
        outcome = _with_progress(options, console)
    except ConfigError as error:
        print(f"ds-silent: {error}", file=sys.stderr)
        return USER_MISTAKE
    except RankBroke as error:
        print(f"ds-silent: a training of the drill broke, so nothing can be said: {error}", file=sys.stderr)
        return 1
    print_report(outcome, console)
    write_json(json_path, to_json(outcome))
    return exit_code(outcome)


def _with_progress(options: DrillOptions, console: Console) -> Outcome:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("starting the ranks", total=None)
        return run_drill(
            options, lambda name: progress.update(task, description=f"{ascii(name)[1:-1]} ended", advance=1)
        )
