"""``ds-silent drill``: from what was typed to an exit code. 0 all found, 1 not all, 2 a mistake of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ds_silent.commands.measuring import Heard, carried_out, console_of_stdout
from ds_silent.config import ConfigError
from ds_silent.drill.program import (
    FRAMEWORKS,
    LONGEST,
    DrillOptions,
    Outcome,
    exit_code,
    faults_of,
    run_drill,
    to_json,
)
from ds_silent.drill.report import print_list, print_report
from ds_silent.drill.setting import Dtype


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
    framework: str = "deepspeed",
) -> int:
    """Runs the drill and prints its report."""
    if list_faults:
        print_list(faults_of(framework).values(), console_of_stdout())
        return 0

    def measure(heard: Heard) -> Outcome:
        if dtype not in (None, "fp32", "bf16"):
            raise ConfigError(f"--dtype must be fp32 or bf16, got {dtype!a}")
        if framework not in FRAMEWORKS:
            raise ConfigError(
                f"--framework must be {', '.join(FRAMEWORKS[:-1])} or {FRAMEWORKS[-1]}, got {framework!a}"
            )
        longest, width = LONGEST if steps is None else steps, cast("Dtype | None", dtype)
        return run_drill(DrillOptions(config, tuple(faults), ranks, rank, longest, stage, width, framework), heard)

    return carried_out(measure, print_report, to_json, exit_code, json_path)
