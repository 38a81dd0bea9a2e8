"""From a model in Megatron-core's ``DistributedDataParallel``, or its chunks, and its optimizer to an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ds_silent.attaching import Given, given_block
from ds_silent.config import ConfigError, SilentConsistencyConfig
from ds_silent.exchange.layout import GATHER_LIMIT
from ds_silent.extras import is_first, needs, print_without_traceback
from ds_silent.frameworks.megatron.buffers import inner_optimizers
from ds_silent.frameworks.megatron.framework import WORDS, MegatronFramework, module_of
from ds_silent.frameworks.torch_attach import Wrapped, attach_wrapped
from ds_silent.observer import Observer
from ds_silent.replicas.duplicates import Duplicates

_MEMBERS = ("buffers", "bucket_groups", "expert_parallel_buffers", "dp_cp_group", "finish_grad_sync")


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
        config, loader, _gather_limit: as :func:`ds_silent.attach_ddp` takes them.
        forward_step: the script's own may be named; the losses are seen in Megatron's schedules without it.
        accumulation: micro-batches per step; by default what Megatron's own calculator says, else 1.

    Returns:
        the observer, or None when the block says ``"enabled": false``.

    Raises:
        ConfigError: the block or the model cannot be honoured; the same on every rank.
        MissingExtra: megatron-core is not installed.
        SinkError: the first rank of a group cannot write to its directory; raised on every rank of the group.
    """
    needs("ds_silent.attach_megatron", "megatron")
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    steps = accumulation or _micro_batches()
    try:
        inner = _checked(chunks, optimizer)
        block = given_block(config)
    except ConfigError:
        print_without_traceback(ConfigError, tells=lambda _: is_first())
        raise
    made: list[MegatronFramework] = []

    def framework(_: Any, config: SilentConsistencyConfig, rows: int, steps: int) -> MegatronFramework:
        made.append(MegatronFramework(chunks, optimizer, config, rows, steps))
        return made[-1]

    wrapped = Wrapped(
        name="Megatron-core's DistributedDataParallel",
        held=chunks[0],
        module=module_of(chunks),
        group=lambda: chunks[0].dp_cp_group,
        framework=framework,
        facts=lambda: {
            "the distributed optimizer": bool(chunks[0].ddp_config.use_distributed_optimizer),
            "the number of chunks": len(chunks),
        },
        sharded=False,
        words=WORDS,
        repairs=False,
    )
    placed = config if block is None else _placed(block, chunks[0])
    observer = attach_wrapped(wrapped, inner, placed, loader, steps, _gather_limit)
    if observer is not None and block is not None and chunks[0].dp_cp_group.rank() == 0:
        made[0].beside = _beside(chunks, block.integrity.replica_interval, observer)
    return observer


def _checked(chunks: Sequence[Any], optimizer: Any) -> list[Any]:
    """The ``torch.optim`` optimizers; raises :class:`ConfigError` for what cannot be observed."""
    for chunk in chunks or [None]:
        named = type(chunk).__name__
        if hasattr(chunk, "ddp_config") and chunk.ddp_config.use_megatron_fsdp:
            raise ConfigError(f"ds_silent cannot observe Megatron-FSDP ({named}) yet; use DistributedDataParallel")
        missing = [member for member in _MEMBERS if not hasattr(chunk, member)]
        if missing:
            raise ConfigError(
                "attach_megatron takes megatron.core.distributed.DistributedDataParallel of megatron-core 0.14 or "
                f"newer, or a list of them, got {named} without {missing[0]}"
            )
        if chunk.expert_parallel_buffers:
            raise ConfigError("ds_silent cannot observe expert parallelism of Megatron-core yet; use expert size 1")
    if not hasattr(optimizer, "get_loss_scale"):
        raise ConfigError(
            f"attach_megatron needs what get_megatron_optimizer has returned, got {type(optimizer).__name__}; give it "
            "as the second argument"
        )
    return [inner for _, inner in inner_optimizers(optimizer)]


def _micro_batches() -> int:
    from megatron.core import num_microbatches_calculator as calculator

    known = getattr(calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None) is not None
    return int(calculator.get_num_microbatches()) if known else 1


def _placed(block: SilentConsistencyConfig, chunk: Any) -> SilentConsistencyConfig:
    """With a directory for each data-parallel group, where there are several."""
    groups = {"tp": chunk.tp_group, "pp": chunk.pp_group}
    label = "-".join(f"{name}{group.rank()}" for name, group in groups.items() if group.size() > 1)
    return block.model_copy(update={"output_dir": f"{block.output_dir}/{label}"}) if label else block


def _beside(chunks: Sequence[Any], every: int, observer: Observer) -> Callable[[int], None]:
    """Compares what other data-parallel groups hold alike, on the first rank of each: its own group sees the rest."""
    kept = list(_duplicates(chunks, every)) if every else []

    def compare(step: int) -> None:
        for event in (duplicates.compare(step) for duplicates in kept):
            if event is not None:
                observer.report(event)

    return compare


def _duplicates(chunks: Sequence[Any], every: int) -> Iterator[Duplicates]:
    named = [(name, p) for chunk in chunks for name, p in chunk.module.named_parameters()]
    whole = [(name, p) for name, p in named if not getattr(p, "tensor_model_parallel", False)]
    if chunks[0].tp_group.size() > 1 and whole:
        ranks = dist.get_process_group_ranks(chunks[0].tp_group)
        yield Duplicates("tensor-parallel duplicates", ranks, whole, every)
    tied = [(name, p) for name, p in named if getattr(p, "shared_embedding", False)]
    if chunks[0].pp_group.size() > 1 and tied:
        from megatron.core import parallel_state

        group = parallel_state.get_embedding_group(check_initialized=False)
        if group is not None:
            yield Duplicates("tied embeddings", dist.get_process_group_ranks(group), tied[:1], every)
