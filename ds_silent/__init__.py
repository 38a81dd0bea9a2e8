"""See every worker of a data-parallel training: a DeepSpeed extension switched on by one config block.

engine, optimizer, loader, scheduler = ds_silent.initialize(model=model, config="ds_config.json")
"""

from ds_silent.attach import attach, initialize, observer_of
from ds_silent.config import ConfigError, SilentConsistencyConfig
from ds_silent.observer import Observer
from ds_silent.records import Event, StepRecord
from ds_silent.sinks import SinkError

__all__ = [
    "ConfigError",
    "Event",
    "Observer",
    "SilentConsistencyConfig",
    "SinkError",
    "StepRecord",
    "attach",
    "initialize",
    "observer_of",
]
__version__ = "0.1.0"
