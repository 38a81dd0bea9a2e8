"""What the callback of any trainer does: find the block that counts, attach once, and go on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig, find_block
from ds_silent.config.block_file import load_ds_config
from ds_silent.config.destination import is_secret
from ds_silent.framework import Promise
from ds_silent.frameworks.attach import attach
from ds_silent.observing.observe import Given, given_block, observer_of, say_alone
from ds_silent.observing.observer import Observer


def attach_once(
    training: Any,
    config: Given,
    launchers: str,
    *,
    optimizer: Any,
    loader: Any,
    accumulation: int,
    promise: Promise | None,
) -> Observer | None:
    """Attach, or return the observer that is there: ``python -m ds_silent`` has honoured the ds_config's block.

    Args:
        training: one that cannot be observed is refused in one sentence.
        launchers: for the sentence about a single process, where a block asks for observation.
        promise: of the trainer.
    """
    observer = observer_of(training)
    if observer is None:
        observer = _attached(training, config, launchers, optimizer, loader, accumulation)
    if observer is not None and promise is not None:
        observer.promised(promise)
    return observer


def _attached(
    training: Any, config: Given, launchers: str, optimizer: Any, loader: Any, accumulation: int
) -> Observer | None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if given_block(config) is not None:
            say_alone(launchers)
        return None
    block = block_for(training, config)
    return attach(training, block, optimizer=optimizer, loader=loader, accumulation=accumulation)


def go_on(observer: Observer, kept: Mapping[str, Any], steps: int, rows: int) -> None:
    """Continue from a checkpoint behind ``steps`` of the trainer.

    Args:
        kept: the observer's state in it; empty where it was written without one.
        rows: of each rank until then, where the state does not say.
    """
    counted = kept.get("counted", {"rows": rows})
    readable = counted if isinstance(counted, Mapping) else {}  # the observer says what is missing
    observer.load_state_dict({**kept, "counted": {**readable, "step": steps + 1}})


def block_for(held: Any, config: Given) -> Given:
    """Return what :func:`ds_silent.attach` is to be given: None for an engine whose own configuration has the block.

    Without one ``config`` counts, or else the defaults: None would mean an engine's own there, which has none.
    """
    if has_own_block(held):
        return None
    return {BLOCK: {}} if config is None else config


def has_own_block(held: Any) -> bool:
    """Tell whether a DeepSpeedEngine's configuration has the block."""
    given = None if isinstance(held, DistributedDataParallel) else getattr(held, "config", None)
    if not isinstance(given, (str, Path, Mapping)):
        return False
    try:
        return find_block(load_ds_config(given)) is not None
    except ConfigError:
        return True  # it is told where all ranks hear of it


def as_json(config: Given) -> Any:
    """Return ``config`` for a checkpoint, which is copied and shared: without alerts whose addresses are secret."""
    if isinstance(config, SilentConsistencyConfig):
        alerts = [one.model_dump(mode="json") | {"to": one.address} for one in config.alerts]
        return without_secrets(config.model_dump(mode="json") | {"alerts": alerts})
    if isinstance(config, Mapping):
        return without_secrets(config)
    return str(config) if isinstance(config, Path) else config


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block, or what holds it, with those of its ``alerts`` that may stand in a file which others read."""
    kept = dict(config)
    if isinstance(kept.get(BLOCK), Mapping):
        kept[BLOCK] = without_secrets(kept[BLOCK])
    if isinstance(kept.get("alerts"), (list, tuple)):
        kept["alerts"] = [one for one in kept["alerts"] if isinstance(one, Mapping) and not is_secret(one.get("to"))]
    return kept
