"""See every worker of a data-parallel training: a DeepSpeed extension switched on by one config block."""

from ds_silent.records import Event, StepRecord

__all__ = ["Event", "StepRecord"]
