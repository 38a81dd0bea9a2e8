"""From a DeepSpeed engine and a block to an observer, and the refusals on the way.

A refusal reaches every rank, whichever rank it comes from: before anything communicates, all ranks agree on the block
and then on what follows from it and the engine (:mod:`ds_silent.ranks.agreement`). ``deepspeed.initialize``
communicates itself, so a rank that refuses remembers that, goes through it with the others, and all end together behind
it. What only rank 0 can know (is the output directory writable, does it hold records?) is agreed with one small
all-reduce.
"""

from __future__ import annotations

import atexit
import inspect
import json
import logging
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from rich.console import Console

from ds_silent.capture.data_facts import data_facts
from ds_silent.capture.step import StepCapture
from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig, find_block, parse
from ds_silent.extras import is_first, print_without_traceback
from ds_silent.frameworks.deepspeed.ds_config import load_ds_config
from ds_silent.frameworks.deepspeed.engine import DeepSpeedFramework
from ds_silent.frameworks.deepspeed.groups import data_parallel_group, engine_facts
from ds_silent.frameworks.deepspeed.refusals import has_optimizer, refuse_unsupported_config, refuse_unsupported_engine
from ds_silent.maths.fingerprint import Hash
from ds_silent.observer import Observer
from ds_silent.preflight import compare as preflight
from ds_silent.preflight.inventory import local_items, sampler_facts, weights_hash
from ds_silent.ranks import start
from ds_silent.sinks import SinkError
from ds_silent.sinks.run_directory import RunDirectory

logger = logging.getLogger("ds_silent")
_ATTRIBUTE = "_ds_silent_observer"


def initialize(*args: Any, sampler: Any = None, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with the ``"silent_consistency"`` block honoured; same arguments, same result.

    Without the block, or with ``"enabled": false``, this is DeepSpeed's own function and nothing more.

    Args:
        sampler: optional, and the only argument that DeepSpeed does not know: this rank's sampler (or its DataLoader)
            where the script makes one itself, so that the preflight can compare how the ranks share the data. Read
            are ``num_replicas``, ``rank``, ``seed``, ``epoch``, ``shuffle`` and ``len(dataset)``, as a
            DistributedSampler has them. The rows are followed without it too, once a DataLoader feeds the training.

    Returns:
        (engine, optimizer, training dataloader, learning-rate scheduler).

    Raises:
        ConfigError: the block, or what it stands beside, cannot be honoured; the same on every rank.
        SinkError: rank 0 cannot write to ``output_dir``; raised on every rank.
    """
    arguments = inspect.signature(_deepspeed_initialize).bind(*args, **kwargs).arguments
    config, refusal = None, None
    try:
        try:
            config = _block_of(arguments)
        except ConfigError as error:
            refusal = error
            if start.alone():
                raise
        model = arguments.get("model")
        # DeepSpeed broadcasts rank 0's weights: what a rank itself had loaded can only be seen before
        before = weights_hash(model) if config is not None and config.preflight and model is not None else None
        try:
            result: tuple[Any, Any, Any, Any] = _deepspeed_initialize(*args, **kwargs)
        except Exception:
            if refusal is not None:
                raise refusal from None
            raise
        _observe(result[0], config, sampler if sampler is not None else result[2], before, refusal)
    except (ConfigError, SinkError):
        print_without_traceback(ConfigError, SinkError, tells=partial(start.tells, default=is_first()))
        raise
    return result


def attach(engine: Any, config: SilentConsistencyConfig | Mapping[str, Any] | None = None) -> Observer | None:
    """Observe an engine that someone else made; ``observer.close()`` undoes it.

    Args:
        engine: a DeepSpeedEngine, before its first step.
        config: a parsed block, or the block as a dict; by default the one in the engine's own configuration.

    Returns:
        the observer, or None when the block says ``"enabled": false`` or the engine has no optimizer.

    Raises:
        ConfigError, SinkError: see :func:`initialize`.
    """
    block, refusal = None, None
    try:
        if isinstance(config, SilentConsistencyConfig):
            block = config
        else:
            block = parse({BLOCK: config if config is not None else find_block(_config_of(engine)) or {}})
    except ConfigError as error:
        refusal = error
    return _observe(engine, block, refusal=refusal)


def observer_of(engine: Any) -> Observer | None:
    """The observer of an engine, or None when it has none (no block, disabled, no optimizer, or closed)."""
    observer: Observer | None = engine.__dict__.get(_ATTRIBUTE)
    return None if observer is None or observer.closed else observer


_deepspeed_initialize = deepspeed.initialize  # kept, because take_its_place puts ours there


def take_its_place() -> None:
    """From now on a script's own ``deepspeed.initialize`` is :func:`initialize`."""
    deepspeed.initialize = initialize


def _observe(
    engine: Any,
    config: SilentConsistencyConfig | None,
    loader: Any = None,
    before: Hash | None = None,
    refusal: ConfigError | None = None,
) -> Observer | None:
    """An observer for an engine. All ranks: the block, refusals, the output directory and the preflight are agreed.

    Args:
        config: None where this rank has no block; then all have none, or all refuse.
        loader: for the preflight.
        before: hash of the weights before DeepSpeed's broadcast.
        refusal: why this rank cannot honour its block.
    """
    if not has_optimizer(engine):
        if dist.get_rank() == 0 and (config is not None or refusal is not None):
            logger.warning(
                "ds_silent: an engine without an optimizer takes no steps: it is not observed, no records of it"
            )
        return None
    if config is not None and refusal is None:
        refusal = _refusal_of(engine, config)
    group, alike = data_parallel_group(engine), partial(engine_facts, engine)
    config = start.agree_on_block(group, alike, config, refusal)
    if config is None:
        return None
    ds_config = _config_of(engine)
    assert group is not None  # all have agreed in it
    capture, unlike = start.agree_on_layout(group, alike, config, lambda: _capture_of(engine, config))
    monitor = getattr(engine, "monitor", None)
    monitor_write = monitor.write_events if monitor is not None and monitor.enabled else None
    home = RunDirectory.open(config, capture.group, capture.device, monitor_write)
    observer = Observer(capture, config, home)
    engine.__dict__[_ATTRIBUTE] = observer
    _close_at_exit(observer)
    if home.sinks is not None:
        steps = "every step" if config.interval == 1 else f"every {config.interval} steps"
        ranks = dist.get_world_size(capture.group)
        # a warning, because a block that is silently not read is the commonest mistake and info is rarely shown
        logger.warning("ds_silent: observing %d ranks, %s; records in %s", ranks, steps, home.says())
    loader = loader if loader is not None else getattr(engine, "training_dataloader", None)
    known = data_facts(loader, dist.get_world_size(capture.group))
    observer.samples_per_epoch, observer.shuffles = known.rows, known.shuffles
    if config.preflight:
        facts = sampler_facts(loader)
        items = local_items(engine, ds_config, facts, before, dist.get_world_size(capture.group))
        outcome = preflight.compare(items, capture.group, capture.device)
        capture.conduct.told_before(outcome)
        if home.sinks is not None:
            _publish_preflight(outcome, observer, home)
    if unlike is not None:
        observer.stand_down(unlike)
    return observer


def _capture_of(engine: Any, config: SilentConsistencyConfig) -> StepCapture:
    return StepCapture(DeepSpeedFramework(engine, config), config)


def _refusal_of(engine: Any, config: SilentConsistencyConfig) -> ConfigError | None:
    try:
        if observer_of(engine) is not None:
            raise ConfigError("this engine is already observed; close its observer (ds_silent.observer_of) first")
        refuse_unsupported_config(_config_of(engine), config)
        refuse_unsupported_engine(engine, config)
    except ConfigError as error:
        return error
    return None


def _publish_preflight(outcome: preflight.Outcome, observer: Observer, home: RunDirectory) -> None:
    console = Console(stderr=True)  # colours on a terminal only, and none with NO_COLOR
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a log has no edge
    console.print(preflight.table(outcome))
    home.write_preflight(json.dumps(preflight.to_json(outcome), indent=1) + "\n")
    for event in preflight.events_of(outcome):
        observer.report(event)


def _config_of(engine: Any) -> dict[str, Any]:
    """The configuration that an engine was made with (``engine.config``: a path, a dict or its base64 form)."""
    return load_ds_config(engine.config) if engine.config is not None else {}


def _block_of(arguments: Mapping[str, Any]) -> SilentConsistencyConfig | None:
    """The block, from wherever DeepSpeed itself reads its configuration."""
    source = arguments.get("config") or arguments.get("config_params")
    source = source or getattr(arguments.get("args"), "deepspeed_config", None)
    if not isinstance(source, (str, Path, Mapping)):
        return None  # DeepSpeed says what is wrong
    ds_config = load_ds_config(source)
    config = parse(ds_config)
    if config is not None:
        refuse_unsupported_config(ds_config, config)
    return config


def _close_at_exit(observer: Observer) -> None:
    """The last step's record is still under way when a script just ends."""
    reference = weakref.ref(observer)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
