"""``ds-silent drill``: from what was typed to an exit code. 0 all found, 1 not all, 2 a mistake of the user."""

from __future__ import annotations

from ds_silent.commands.measuring import Heard, carried_out, console_of_stdout
from ds_silent.config import ConfigError
from ds_silent.drill.program import FRAMEWORKS, DrillOptions, Outcome, exit_code, faults_of, run_drill, to_json
from ds_silent.drill.report import print_list, print_report


def drill_command(options: DrillOptions, list_faults: bool, json_path: str | None) -> int:
    """Run the drill and print its report. ``options``: as typed."""
    dtype, framework = options.dtype, options.framework
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
        return run_drill(options, heard)

    return carried_out(measure, print_report, to_json, exit_code, json_path)
