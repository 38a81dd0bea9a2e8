"""``ds-silent numerics``: from what was typed to an exit code. 0 sound, 1 not, 2 a mistake of the user."""

from __future__ import annotations

import math

from ds_silent.commands.measuring import Heard, carried_out
from ds_silent.config import ConfigError
from ds_silent.numerics.orders import DTYPES
from ds_silent.numerics.program import Findings, Options, measure, to_json
from ds_silent.numerics.report import print_report


def numerics_command(options: Options, json_path: str | None) -> int:
    """Measure, and print the report."""

    def measured(heard: Heard) -> Findings:
        for dtype in options.dtypes:
            if dtype not in DTYPES:
                raise ConfigError(f"--dtype must be fp32, bf16 or fp16, got {dtype!a}")
        if options.loss_scale is not None and not math.isfinite(options.loss_scale):
            raise ConfigError(f"--loss-scale must be a finite number of at least 1, got {options.loss_scale}")
        return measure(options, heard)

    return carried_out(measured, print_report, to_json, lambda findings: 0 if findings.sound else 1, json_path)
