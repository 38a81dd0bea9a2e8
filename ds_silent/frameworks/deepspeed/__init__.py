"""DeepSpeed's adapter: the only folder that touches its inside.

``engine.py`` hooks one engine's step; the others say where its optimizers keep what. Every touch of an internal says
what it relies on; all were read in 0.16.9 and 0.19.8.
"""

from ds_silent.frameworks.deepspeed.applied import base_optimizers
from ds_silent.frameworks.deepspeed.engine import DeepSpeedFramework
from ds_silent.frameworks.deepspeed.groups import data_parallel_group, engine_facts
from ds_silent.frameworks.deepspeed.own_config import left_to_fill_in, refuse_broken
from ds_silent.frameworks.deepspeed.refusals import (
    has_optimizer,
    refuse_too_few_ranks,
    refuse_unsupported_config,
    refuse_unsupported_engine,
)

__all__ = [
    "DeepSpeedFramework",
    "base_optimizers",
    "data_parallel_group",
    "engine_facts",
    "has_optimizer",
    "left_to_fill_in",
    "refuse_broken",
    "refuse_too_few_ranks",
    "refuse_unsupported_config",
    "refuse_unsupported_engine",
]
