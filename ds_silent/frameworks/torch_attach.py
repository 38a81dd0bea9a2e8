"""From a module that torch itself trains data-parallel, and its optimizers, to an observer: DDP and FSDP2 alike."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig
from ds_silent.exchange.layout import GATHER_LIMIT
from ds_silent.framework import Framework
from ds_silent.observing.attach import Given, Subject, given_block, observe, told_in_a_sentence
from ds_silent.observing.observer import Observer
from ds_silent.observing.refusals import refuse_sparse_gradients, refuse_too_few_ranks
from ds_silent.preflight.compare import Item
from ds_silent.preflight.inventory import Training
from ds_silent.preflight.settings import groups_of
from ds_silent.text import TORCH, Words

ROWS = 64  # of a micro-batch, where nobody says how many: room for the rows' ids


@dataclass(frozen=True)
class Wrapped:
    """A model that torch trains data-parallel."""

    name: str  # of what wraps it
    held: Any  # what the script holds
    module: nn.Module  # whose parameters are trained
    group: Callable[[], dist.ProcessGroup]  # that reduces; raises ConfigError where there is no single one
    framework: Callable[[Sequence[Any], SilentConsistencyConfig, int, int], Framework]  # optimizers, .., rows, steps
    facts: Callable[[], dict[str, Any]]  # what else the ranks' collectives follow from
    sharded: bool  # no rank holds a whole parameter
    words: Words = TORCH
    repairs: bool = True  # whole replicas can be written between two steps
    others: Callable[[Tensor], bool] = lambda tensor: False  # not every rank has this one: experts
    config: Callable[[], list[Item]] = list  # of what the user has configured, which every rank must have alike


def attach_wrapped(
    wrapped: Wrapped, optimizer: Any, config: Given, loader: Any, accumulation: int, gather_limit: int = GATHER_LIMIT
) -> Observer | None:
    """See :func:`ds_silent.attach_ddp`. Every rank calls it."""
    optimizers = [torch_optimizer(one) for one in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    block, refusal = None, None
    try:
        refuse_strange_optimizers(wrapped.name, optimizers)
        block = given_block(config)
    except ConfigError as error:
        refusal = error
    with told_in_a_sentence():
        rows = rows_per_batch(loader) or ROWS
        subject = Subject(
            held=wrapped.held,
            words=wrapped.words,
            group=wrapped.group(),
            facts=lambda: {"the number of micro-batches": accumulation, **parameter_facts(wrapped), **wrapped.facts()},
            refuse=partial(refuse_unsupported, wrapped),
            framework=lambda own: wrapped.framework(optimizers, own, rows, accumulation),
            training=lambda: Training(
                wrapped.words.framework,
                wrapped.module,
                optimizers[0],
                config=wrapped.config,
                sharded=lambda tensor: wrapped.sharded or wrapped.others(tensor),
                groups=partial(groups_of, optimizers),
            ),
            loader=loader,
            gather_limit=gather_limit,
        )
        return observe(subject, block, refusal)


def torch_optimizer(optimizer: Any) -> Any:
    """What an ``AcceleratedOptimizer`` holds, which is a torch optimizer in name only; else the optimizer itself."""
    accelerated = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", ())
    return optimizer.optimizer if isinstance(optimizer, accelerated) else optimizer


def rows_per_batch(loader: Any) -> int | None:
    """Rows that a loader, its iterator, or the batch sampler in it, gives at once; None where it does not say."""
    held = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "_index_sampler", None))
    sizes = (getattr(one, "batch_size", None) for one in held)
    return next((size for size in sizes if isinstance(size, int)), None)


def refuse_strange_optimizers(name: str, optimizers: Sequence[Any]) -> None:
    """Raise :class:`ConfigError` for what does not step parameters as torch's optimizers do."""
    for optimizer in optimizers or [None]:
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise ConfigError(
                f"ds_silent needs the torch optimizer that steps this {name} model, got {type(optimizer).__name__}; "
                "give it as the second argument, or several as a list"
            )


def refuse_unsupported(wrapped: Wrapped, config: SilentConsistencyConfig) -> None:
    """Raise :class:`ConfigError` for what only other frameworks can do."""
    refuse_too_few_ranks(config, wrapped.group().size())
    refuse_sparse_gradients(wrapped.module)
    respond, resync = config.respond, config.resync
    if config.reduction == "ordered":
        raise ConfigError(f'{BLOCK}.reduction "ordered" is for DeepSpeed; use "native" with {wrapped.name}')
    if respond.on_aggregation_error != "report":
        raise ConfigError(
            f'{BLOCK}.respond.on_aggregation_error "{respond.on_aggregation_error}" is for DeepSpeed; use "report" '
            f'with {wrapped.name}, and detectors.stop_on "error" to end the training'
        )
    if respond.on_replica_drift == "stop":
        raise ConfigError(
            f'{BLOCK}.respond.on_replica_drift "stop" writes a checkpoint of DeepSpeed; use "report" with '
            f'{wrapped.name}, and detectors.stop_on "error" to end the training'
        )
    writes = respond.on_replica_drift != "report" or resync.mode != "off"
    if writes and not wrapped.repairs:
        raise ConfigError(
            f"{BLOCK}.respond.on_replica_drift and {BLOCK}.resync write weights, which ds_silent does not do with "
            f'{wrapped.name} yet; use "report" and "off"'
        )
    if wrapped.sharded and writes:
        raise ConfigError(
            f"{BLOCK}.respond.on_replica_drift and {BLOCK}.resync need whole replicas, and {wrapped.name} shards "
            'them; use "report" and "off"'
        )


def parameter_facts(wrapped: Wrapped) -> dict[str, Any]:
    """What all ranks must have alike, by the names that a person would look for; JSON values."""
    named = [(name, p) for name, p in wrapped.module.named_parameters() if p.requires_grad]
    listed = hashlib.sha256(repr([(name, p.numel()) for name, p in named]).encode()).hexdigest()[:8]
    return {
        "the dtypes of the trainable parameters": sorted({str(p.dtype) for _, p in named}),
        "the list of trainable parameters": f"{len(named)} [{listed}]",
    }
