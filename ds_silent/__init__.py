"""See every worker of a data-parallel training: a DeepSpeed extension switched on by one config block.

    engine, optimizer, loader, scheduler = ds_silent.initialize(model=model, config="ds_config.json")

Each name is loaded when it is first asked for, so that who reads records or a configuration needs no framework. What
does need one and does not find it says in one sentence which extra to install.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from ds_silent.extras import VERSION
from ds_silent.patches import Patches

if TYPE_CHECKING:
    from ds_silent.comparison import TrainingComparison, compare
    from ds_silent.comparison.log_probabilities import LogProbabilityGap, log_probability_gap
    from ds_silent.config import ConfigError, SilentConsistencyConfig
    from ds_silent.frameworks.attach import attach, observe
    from ds_silent.frameworks.ddp import attach_ddp
    from ds_silent.frameworks.deepspeed.attach_deepspeed import initialize
    from ds_silent.frameworks.megatron.megatron_framework import attach_megatron
    from ds_silent.frameworks.weight_fingerprint import Fingerprint, fingerprint
    from ds_silent.observing.observe import observer_of
    from ds_silent.observing.observer import Observer
    from ds_silent.records import Event, StepRecord
    from ds_silent.sinks import SinkError

__all__ = [
    "ConfigError",
    "Event",
    "Fingerprint",
    "LogProbabilityGap",
    "Observer",
    "SilentConsistencyConfig",
    "SinkError",
    "StepRecord",
    "TrainingComparison",
    "attach",
    "attach_ddp",
    "attach_megatron",
    "compare",
    "fingerprint",
    "initialize",
    "log_probability_gap",
    "observe",
    "observer_of",
]
__version__ = VERSION

_MODULES = {
    "TrainingComparison": "comparison",
    "ConfigError": "config",
    "Event": "records",
    "Fingerprint": "frameworks.weight_fingerprint",
    "LogProbabilityGap": "comparison.log_probabilities",
    "Observer": "observing.observer",
    "SilentConsistencyConfig": "config",
    "SinkError": "sinks",
    "StepRecord": "records",
    "attach_ddp": "frameworks.ddp",
    "attach_megatron": "frameworks.megatron.megatron_framework",
    "attach": "frameworks.attach",
    "compare": "comparison",
    "fingerprint": "frameworks.weight_fingerprint",
    "log_probability_gap": "comparison.log_probabilities",
    "initialize": "frameworks.deepspeed.attach_deepspeed",
    "observe": "frameworks.attach",
    "observer_of": "observing.observe",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_MODULES[name]}"
    if ".deepspeed." in module:
        from ds_silent.extras import needs

        needs(f"{__name__}.{name}", "deepspeed")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def _when_deepspeed_is_there(_: object) -> None:
    try:
        from ds_silent.frameworks.deepspeed.refusals import say_if_a_block_is_not_read

        say_if_a_block_is_not_read()
    except Exception as error:  # it is only for a sentence
        logging.getLogger("ds_silent").debug("ds_silent: blocks of ds_configs are not looked for: %s", error)


Patches().after_import("deepspeed", _when_deepspeed_is_there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
