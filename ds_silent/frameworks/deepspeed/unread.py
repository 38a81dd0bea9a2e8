"""A ``silent_consistency`` block that nobody reads: DeepSpeed keeps a key that it does not know, without a word.

    say_if_a_block_is_not_read()     # where a script has imported both

An engine may be attached after it was made, so the sentence comes at its first training forward.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import deepspeed
import torch

from ds_silent.config import BLOCK, ConfigError, parse
from ds_silent.config_file import load_ds_config
from ds_silent.extras import is_first
from ds_silent.frameworks.deepspeed.refusals import has_optimizer

logger = logging.getLogger("ds_silent")


def say_if_a_block_is_not_read() -> None:
    """Look at the configuration of every engine that a script makes by ``deepspeed.initialize`` from now on."""
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        try:
            _look_at(made[0])
        except Exception as error:  # another DeepSpeed
            logger.debug("ds_silent: this engine's ds_config is not looked at: %s", error)
        return made

    deepspeed.initialize = initialize


def _look_at(engine: Any) -> None:
    if engine.config is None or not is_first() or not has_optimizer(engine):
        return
    try:
        block = parse(load_ds_config(engine.config))
    except ConfigError as error:
        logger.warning("ds_silent: %s", error)
        return
    if block is None:
        return

    def forward_begins(module: Any, inputs: Any) -> None:
        from ds_silent.observing.observe import observer_of

        if not (torch.is_grad_enabled() and module.training):
            return
        handle.remove()
        if observer_of(module) is None:
            logger.warning(
                "ds_silent: the ds_config has a %s block, and nothing observes its engine, because DeepSpeed does not "
                "read the block; call ds_silent.initialize instead of deepspeed.initialize, or start the unchanged "
                "script with deepspeed --module ds_silent train.py",
                BLOCK,
            )

    handle = engine.register_forward_pre_hook(forward_begins)
