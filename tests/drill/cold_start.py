"""Where a training of the drill starts without its warm-up."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_silent.drill.run_trial import Start
from ds_silent.drill.setting import DrillSetting, make_setting
from ds_silent.practice.model import PracticeModel, PracticeRows, make_rows

QUIET = {"detectors": {"enabled": False}, "coverage": False, "preflight": False}


def cold_start(block: dict[str, Any], zero_stage: int, dtype: Any, accumulation: int = 1) -> Start:
    """Under DeepSpeed."""
    given = {"silent_consistency": {**QUIET, **block}, "gradient_accumulation_steps": accumulation}
    return cold(make_setting(given, dist.get_world_size(), zero_stage, dtype))


def cold(setting: DrillSetting) -> Start:
    """Without the warm-up: what an injection does to a gradient does not depend on it."""
    torch.manual_seed(7)
    weights = {name: value.clone() for name, value in PracticeModel().state_dict().items()}
    rows: PracticeRows = make_rows(16 * setting.micro_batch * setting.accumulation * setting.ranks, seed=1)
    return Start(setting, rows, weights)
