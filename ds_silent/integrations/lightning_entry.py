"""Lightning's Trainer, observed without a line of the script: what its entry points find.

    SILENT_CONSISTENCY_CONFIG=silent.json torchrun --nproc_per_node 4 train.py

Lightning asks every installed package for callbacks, at every ``Trainer(...)``. Ours looks, as a training begins,
whether there is a block: that of the DeepSpeed strategy's configuration, else in the file that the environment names.
Where there is none nothing is imported, said or kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from ds_silent.integrations import BLOCK_FILE


def in_lightning() -> list[Any]:
    """Return the callback, for the entry point ``lightning.pytorch.callbacks_factory``."""
    return _callbacks("lightning.pytorch")


def in_pytorch_lightning() -> list[Any]:
    """Return the callback, for the entry point ``pytorch_lightning.callbacks_factory``."""
    return _callbacks("pytorch_lightning")


def _callbacks(package: str) -> list[Any]:
    """Make it where there may be a block: Lightning's strategy has imported DeepSpeed before it asks."""
    if not os.environ.get(BLOCK_FILE) and "deepspeed" not in sys.modules:
        return []
    return [type("SilentConsistencyEntry", (sys.modules[package].Callback,), {"setup": _setup})()]


def _setup(self: Any, trainer: Any, pl_module: Any, stage: str) -> None:
    """Let the callback that observes take this one's place, if there is a block, before a checkpoint is read.

    One that the script has given itself stays the only one.
    """
    file = os.environ.get(BLOCK_FILE)
    if stage != "fit" or any(getattr(one, "observes_consistency", False) for one in trainer.callbacks):
        return
    if file or _has_block(getattr(trainer.strategy, "config", None)):
        from ds_silent.integrations.lightning import SilentConsistencyCallback

        trainer.callbacks[trainer.callbacks.index(self)] = SilentConsistencyCallback(file or None)


def _has_block(ds_config: Any) -> bool:
    """Tell whether there is one, also one whose name is misspelt: that is said later."""
    return isinstance(ds_config, Mapping) and any("silent" in str(key).lower() for key in ds_config)
