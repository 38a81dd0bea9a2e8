"""``ds-silent numerics``: from what was typed to an exit code. 0 sound, 1 not, 2 a mistake of the user."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress

from ds_silent.commands.json_file import refuse_unwritable, write_json
from ds_silent.config import ConfigError
from ds_silent.numerics.orders import DTYPES
from ds_silent.numerics.program import Findings, Options, measure, to_json
from ds_silent.numerics.report import print_report
from ds_silent.practice.ranks import RankBroke

USER_MISTAKE = 2
WIDTH = 120  # of what goes into a file or a pipe


def numerics_command(
    gradients: str | None,
    world_sizes: Sequence[int],
    dtypes: Sequence[str],
    steps: int,
    rounds: int,
    processes: bool,
    elements: int | None,
    loss_scale: float | None,
    seed: int,
    json_path: str | None,
) -> int:
    """Measures and prints the report on standard output; a mistake is one sentence on standard error."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        for dtype in dtypes:
            if dtype not in DTYPES:
                raise ConfigError(f"--dtype must be fp32, bf16 or fp16, got {dtype!a}")
        if loss_scale is not None and not math.isfinite(loss_scale):
            raise ConfigError(f"--loss-scale must be a finite number of at least 1, got {loss_scale}")
        refuse_unwritable(json_path)
        chosen = tuple(dict.fromkeys(dtypes)) or tuple(DTYPES)
        findings = _with_progress(
            Options(gradients, tuple(world_sizes), chosen, steps, rounds, processes, elements, loss_scale, seed),
            console,
        )
    except ConfigError as error:
        print(f"ds-silent: {error}", file=sys.stderr)
        return USER_MISTAKE
    except RankBroke as error:
        print(f"ds-silent: a process of the all-reduces broke, so nothing can be said: {error}", file=sys.stderr)
        return 1
    print_report(findings, console)
    write_json(json_path, to_json(findings))
    return 0 if findings.sound else 1


def _with_progress(options: Options, console: Console) -> Findings:
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None)
        return measure(options, lambda name: progress.update(task, description=f"{name} ended", advance=1))
