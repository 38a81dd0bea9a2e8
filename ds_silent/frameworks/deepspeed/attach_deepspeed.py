"""From ``deepspeed.initialize``, or from an engine that is there, to its observer.

``deepspeed.initialize`` communicates itself, so a rank that refuses remembers that, goes through it with the others,
and all end together behind it (:mod:`ds_silent.observing.observe`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.utils import logger as deepspeed_logger

from ds_silent.config import ConfigError, SilentConsistencyConfig, find_block, parse
from ds_silent.config.block_file import load_ds_config
from ds_silent.config.destination import masked_in_log
from ds_silent.frameworks.deepspeed.engine import DeepSpeedFramework
from ds_silent.frameworks.deepspeed.refusals import has_optimizer, refuse_unsupported_config, refuse_unsupported_engine
from ds_silent.frameworks.deepspeed.state import (
    WORDS,
    Shape,
    data_parallel_group,
    engine_facts,
    is_sharded,
    shape_of,
    training_of,
)
from ds_silent.maths.fingerprint import Hash
from ds_silent.observing import start
from ds_silent.observing.observe import Given, Subject, given_block, observe, told_in_a_sentence
from ds_silent.observing.observer import Observer
from ds_silent.observing.start import placed
from ds_silent.patches import Patches
from ds_silent.preflight.inventory import weights_hash
from ds_silent.rules.known_optimizers import number

logger = logging.getLogger("ds_silent")


def initialize(*args: Any, sampler: Any = None, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Call ``deepspeed.initialize`` and honour the ``"silent_consistency"`` block; same arguments, same result.

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
    with told_in_a_sentence():
        try:
            config = _block_of(arguments)
        except ConfigError as error:
            refusal = error
            if start.alone():
                raise
        # DeepSpeed broadcasts rank 0's weights: what a rank itself had loaded can only be seen before
        model = arguments.get("model") if config is not None and config.preflight else None
        before = None if model is None else weights_hash(model, is_sharded)
        try:
            with masked_in_log(deepspeed_logger, _raw_block(arguments)), rates_before() as rates:
                result: tuple[Any, Any, Any, Any] = _deepspeed_initialize(*args, **kwargs)
        except Exception:
            if refusal is not None:
                raise refusal from None
            raise
        loader = sampler if sampler is not None else result[2]
        _observe(result[0], config, refusal, loader, before, rates)
    return result


@contextmanager
def rates_before() -> Iterator[list[tuple[Any, list[float | None]]]]:
    """Note each group's rate when a WarmupLR is made without ``warmup_max_lr``: it overwrites what it rises to."""
    made: list[tuple[Any, list[float | None]]] = []

    def makes(original: Callable[..., None], scheduler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        given = args[1] if len(args) > 1 else kwargs.get("warmup_max_lr")
        if given is None:
            made.append((scheduler, [number(group["lr"]) for group in getattr(optimizer, "param_groups", ())]))
        original(scheduler, optimizer, *args, **kwargs)

    patches = Patches()
    patches.wrap_method(WarmupLR, "__init__", makes)  # WarmupDecayLR calls it, too (0.16.9 to 0.19.8)
    try:
        yield made
    finally:
        patches.undo()


def attach_engine(engine: Any, config: Given = None, *, loader: Any = None) -> Observer | None:
    """Observe an engine that someone else made, as :func:`ds_silent.attach` does."""
    block, refusal = None, None
    try:
        block = given_block(config if config is not None else find_block(_config_of(engine)), "ds_config")
    except ConfigError as error:
        refusal = error
    return _observe(engine, block, refusal, loader)


_deepspeed_initialize = deepspeed.initialize  # kept, because take_its_place puts ours there


_fallback: list[SilentConsistencyConfig] = []  # the block of a ds_config that has none, of who ran the script


def take_its_place(block: SilentConsistencyConfig | None = None) -> None:
    """From now on a script's own ``deepspeed.initialize`` is :func:`initialize`; ``block`` is for a ds_config without
    one."""
    deepspeed.initialize = initialize
    _fallback[:] = [] if block is None else [block]


def _observe(
    engine: Any,
    config: SilentConsistencyConfig | None,
    refusal: ConfigError | None,
    loader: Any = None,
    before: Hash | None = None,
    rates: Sequence[tuple[Any, list[float | None]]] = (),
) -> Observer | None:
    """See :func:`ds_silent.observing.observe.observe`; ``rates``: see :func:`rates_before`."""
    if not has_optimizer(engine):
        if dist.get_rank() == 0 and (config is not None or refusal is not None):
            logger.warning(
                "ds_silent: an engine without an optimizer takes no steps: it is not observed, no records of it"
            )
        return None
    monitor = getattr(engine, "monitor", None)
    came_with = next((groups for scheduler, groups in rates if scheduler is engine.lr_scheduler), None)
    subject = Subject(
        held=engine,
        words=WORDS,
        group=data_parallel_group(engine),
        facts=partial(engine_facts, engine),
        refuse=partial(_refuse, engine),
        framework=partial(DeepSpeedFramework, engine, came_with=came_with),
        training=lambda: training_of(engine, _config_of(engine)),
        loader=loader if loader is not None else getattr(engine, "training_dataloader", None),
        before=before,
        monitor_write=monitor.write_events if monitor is not None and monitor.enabled else None,
    )
    return observe(subject, None if config is None else _of_shape(config, shape_of(engine)), refusal)


def _of_shape(config: SilentConsistencyConfig, shape: Shape) -> SilentConsistencyConfig:
    """Give the data-parallel group its own directory; rows are followed where they are seen."""
    return placed(config, shape.label).model_copy(update={"coverage": config.coverage and shape.sees_rows})


def _refuse(engine: Any, config: SilentConsistencyConfig) -> None:
    refuse_unsupported_config(_config_of(engine), config)
    refuse_unsupported_engine(engine, config)


def _config_of(engine: Any) -> dict[str, Any]:
    """Return the configuration that an engine was made with (``engine.config``: a path, a dict or its base64 form)."""
    return load_ds_config(engine.config) if engine.config is not None else {}


def _source_of(arguments: Mapping[str, Any]) -> str | Path | Mapping[str, Any] | None:
    """Return what DeepSpeed itself reads its configuration from; None where it says what is wrong."""
    source = arguments.get("config") or arguments.get("config_params")
    source = source or getattr(arguments.get("args"), "deepspeed_config", None)
    return source if isinstance(source, (str, Path, Mapping)) else None


def _raw_block(arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the block as it stands, which DeepSpeed is about to log (runtime/engine.py, 0.16 to 0.19)."""
    source = _source_of(arguments)
    try:
        return None if source is None else find_block(load_ds_config(source))
    except ConfigError:  # it is told elsewhere
        return None


def _block_of(arguments: Mapping[str, Any]) -> SilentConsistencyConfig | None:
    """Return the block, parsed."""
    source = _source_of(arguments)
    if source is None:
        return None
    ds_config = load_ds_config(source)
    config = parse(ds_config)
    if _fallback and find_block(ds_config) is None:
        config = _fallback[0]
    if config is not None:
        refuse_unsupported_config(ds_config, config)
    return config
