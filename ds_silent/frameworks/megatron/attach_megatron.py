"""From a model in Megatron-core's ``DistributedDataParallel``, or its chunks, and its optimizer to an observer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_silent.config import ConfigError
from ds_silent.exchange.layout import GATHER_LIMIT
from ds_silent.extras import is_first, needs, print_without_traceback
from ds_silent.frameworks.megatron.buffers import inner_optimizers
from ds_silent.frameworks.megatron.megatron_framework import WORDS, MegatronFramework, module_of
from ds_silent.frameworks.recognised import is_alone, is_megatron
from ds_silent.frameworks.torch_common import Wrapped, attach_wrapped
from ds_silent.observing.observe import Given, given_block, idle_observer
from ds_silent.observing.observer import Observer
from ds_silent.observing.start import label_of, placed
from ds_silent.preflight.inventory import config_item
from ds_silent.preflight.items import Item

_MEMBERS = ("buffers", "bucket_groups", "expert_parallel_buffers", "dp_cp_group", "finish_grad_sync", "tp_group")


def attach_megatron(
    model: Any,
    optimizer: Any,
    config: Given = None,
    *,
    forward_step: Any = None,
    loader: Any = None,
    accumulation: int | None = None,
    _gather_limit: int = GATHER_LIMIT,
) -> Observer | None:
    """Observe a Megatron-core training; ``observer.close()`` undoes it. Every rank calls it.

    Each data-parallel group is observed by itself. Where there are several (tensor or pipeline parallelism), their
    records are in directories of their own below ``output_dir``, such as ``tp0-pp1``.

    Args:
        model: what ``DistributedDataParallel`` has made of the model, or the list of its chunks, before its first step.
        optimizer: what ``get_megatron_optimizer`` has returned.
        config: the block as a dict, parsed, or the path of a file that holds it (alone, or under its name); by default
            all defaults.
        forward_step: the script's own may be named; the losses are seen in Megatron's schedules without it.
        loader: this rank's DataLoader or sampler, as :func:`ds_silent.attach_ddp` takes it.
        accumulation: micro-batches per step; by default what Megatron's own calculator says, else 1.
        _gather_limit: for tests: a few ranks can be above it.

    Returns:
        the observer, or None when the block says ``"enabled": false``.

    Raises:
        ConfigError: the block or the model cannot be honoured; the same on every rank.
        MissingExtra: megatron-core is not installed.
        SinkError: the first rank of a group cannot write to its directory; raised on every rank of the group.
    """
    needs("ds_silent.attach_megatron", "megatron")
    if is_alone(model) and not is_megatron(model):
        return idle_observer(config)
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    try:
        inner = _checked(chunks, optimizer)
        block = given_block(config)
    except ConfigError:
        print_without_traceback(ConfigError, tells=lambda _: is_first())
        raise
    experts = {id(p) for chunk in chunks for buffer in chunk.expert_parallel_buffers for p in buffer.param_index_map}
    wrapped = Wrapped(
        name="Megatron-core's DistributedDataParallel",
        held=chunks[0],
        module=module_of(chunks),
        group=lambda: chunks[0].dp_cp_group,
        framework=lambda _, config, rows, steps: MegatronFramework(chunks, optimizer, config, rows, steps),
        facts=lambda: {
            "the distributed optimizer": bool(chunks[0].ddp_config.use_distributed_optimizer),
            "the number of chunks": len(chunks),
        },
        sharded=False,
        words=WORDS,
        repairs=False,
        others=lambda tensor: id(tensor) in experts,
        config=lambda: [item for held in (optimizer.config, chunks[0].ddp_config) for item in _settings(held)],
    )
    places = {"tp": chunks[0].tp_group, "pp": chunks[0].pp_group}
    label = label_of({name: (group.rank(), group.size()) for name, group in places.items()})
    own = config if block is None else placed(block, label)
    return attach_wrapped(wrapped, inner, own, loader, accumulation or _micro_batches(), _gather_limit)


def _checked(chunks: Sequence[Any], optimizer: Any) -> list[Any]:
    """The ``torch.optim`` optimizers; raises :class:`ConfigError` for what cannot be observed."""
    for chunk in chunks or [None]:
        named = type(chunk).__name__
        if hasattr(chunk, "ddp_config") and chunk.ddp_config.use_megatron_fsdp:
            raise ConfigError(
                f"ds_silent cannot observe Megatron-FSDP ({named}), which reduces each micro-batch's gradients into "
                "shards and frees them; use DistributedDataParallel with the distributed optimizer"
            )
        missing = [member for member in _MEMBERS if not hasattr(chunk, member)]
        if missing:
            raise ConfigError(
                "attach_megatron takes megatron.core.distributed.DistributedDataParallel of megatron-core 0.15 or "
                f"newer, or a list of them, got {named} without {missing[0]} of megatron-core {_version()}"
            )
        if chunk.expert_parallel_buffers:
            among, all_ranks = (
                dist.get_process_group_ranks(group) for group in (chunk.expt_dp_group, chunk.dp_cp_group)
            )
            if not set(among) <= set(all_ranks):
                raise ConfigError(
                    f"ds_silent needs the ranks that share experts to be data-parallel ranks, got {among} of "
                    f"{all_ranks}; use an expert_tensor_parallel_size that divides the tensor parallelism evenly"
                )
    if not hasattr(optimizer, "get_loss_scale"):
        raise ConfigError(
            f"attach_megatron needs what get_megatron_optimizer has returned, got {type(optimizer).__name__}; give it "
            "as the second argument"
        )
    return [inner for _, inner in inner_optimizers(optimizer)]


def _settings(config: Any) -> list[Item]:
    """Of one of Megatron's configurations; of what is no plain value, its type."""
    plain = (bool, int, float, str, torch.dtype, type(None))
    return [
        config_item(f"{type(config).__name__}.{name}", value if isinstance(value, plain) else type(value).__name__)
        for name, value in vars(config).items()
    ]


def _version() -> str:
    from megatron import core

    return str(getattr(core, "__version__", "of no version"))


def _micro_batches() -> int:
    from megatron.core import num_microbatches_calculator as calculator

    known = getattr(calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None) is not None
    return int(calculator.get_num_microbatches()) if known else 1
