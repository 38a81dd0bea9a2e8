"""Where a training of the drill starts without its warm-up."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_silent.drill.deepspeed.setting import make_setting
from ds_silent.drill.rehearsal import Start
from ds_silent.practice.model import PracticeModel, Rows, make_rows


def cold_start(block: dict[str, Any], zero_stage: int, dtype: Any, accumulation: int = 1) -> Start:
    """Without the warm-up: what an injection does to a gradient does not depend on it."""
    quiet = {"detectors": {"enabled": False}, "coverage": False, "preflight": False}
    given = {"silent_consistency": {**quiet, **block}, "gradient_accumulation_steps": accumulation}
    setting = make_setting(given, dist.get_world_size(), zero_stage, dtype)
    torch.manual_seed(7)
    weights = {name: value.clone() for name, value in PracticeModel().state_dict().items()}
    rows: Rows = make_rows(16 * setting.micro_batch * accumulation * dist.get_world_size(), seed=1)
    return Start(setting, rows, weights)
