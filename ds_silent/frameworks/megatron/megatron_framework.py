"""The chunks of one model in Megatron-core's ``DistributedDataParallel``: what they answer, and where the hooks are.

observer = attach_megatron(chunks, optimizer, config)
framework = MegatronFramework(chunks, optimizer, config, rows=4, accumulation=8)
framework.connect(moments)
framework.close(ended=True)          # chunks, buckets and optimizers are as they were

Gradients accumulate in ``parameter.main_grad``, where fused kernels write too: so each is looked at once per step,
whole, as the reduction of its bucket starts. The factor that it should be reduced with follows from the configuration,
never from the bucket's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ds_silent.config import ConfigError, SilentConsistencyConfig
from ds_silent.extras import needs
from ds_silent.framework import Framework, Moments, Part, Promise
from ds_silent.frameworks import torch_common
from ds_silent.frameworks.megatron.buffers import Buffers, inner_optimizers, trained_by
from ds_silent.frameworks.megatron.peers import MegatronPeers
from ds_silent.frameworks.torch_common import Wrapped, attach_wrapped, idle_or_refused
from ds_silent.kernels.checksums import Items
from ds_silent.maths.rounding_bound import Arithmetic, coarsest
from ds_silent.observing.observe import Given, given_block
from ds_silent.observing.observer import Observer
from ds_silent.observing.start import label_of, placed
from ds_silent.patches import Patches
from ds_silent.preflight.inventory import config_item
from ds_silent.preflight.items import Item
from ds_silent.text import Words

# ----------------------------------------------------------------------------------------------------------------------
# The losses of Megatron's schedules, which no module returns: the script's ``forward_step`` names a function for
# them.
#
# ``schedules.forward_step`` is looked up by every schedule when it is called; it is the only place that all go
# through.


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def watch_losses(
    patches: Patches, chunks: Sequence[Any], tell: Callable[[Tensor], object], handed: Callable[[Tensor], object]
) -> None:
    """Call ``tell`` with the loss of each micro-batch of these chunks, and ``handed`` with what the schedule gets of
    it, on the ranks that compute one."""
    own = {id(chunk) for chunk in chunks}

    def forward_step(original: Callable[..., Any], script: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = args[1] if len(args) > 1 else kwargs.get("model")
        return original(_told(script, tell, handed) if id(model) in own else script, *args, **kwargs)

    schedules = sys.modules.get(_SCHEDULES)
    if hasattr(schedules, "forward_step"):
        patches.wrap(schedules, "forward_step", forward_step)


def _told(
    script: Callable[..., Any], tell: Callable[[Tensor], object], handed: Callable[[Tensor], object]
) -> Callable[..., Any]:
    """Wrap the script's ``forward_step``, so that its loss function tells what it returns."""

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = script(*args, **kwargs)
        if loss_function is None or not torch.is_grad_enabled():
            return output, loss_function

        def told(*given: Any, **named: Any) -> Any:
            result = loss_function(*given, **named)
            if isinstance(result, tuple) and isinstance(result[0], Tensor) and result[0].numel() == 1:
                tell(_mean(result))
                handed(result[0])
            return result

        return output, told

    return forward_step


def _mean(result: tuple[Any, ...]) -> Tensor:
    """Return that of (mean, ..) or (sum over tokens, tokens, ..): a copy, because the schedule divides it in place."""
    loss: Tensor = result[0].detach().clone()
    return loss / torch.as_tensor(result[1], device=loss.device).clamp(min=1) if len(result) == 3 else loss


WORDS = Words(
    framework="Megatron-core",
    begin="ds_silent.attach_megatron",
    another_reduction="try another megatron-core version, or without overlap_grad_reduce",
    not_cleared="Call zero_grad_buffer() and optimizer.zero_grad() between a step and the next backward",
    update_settings="clip_grad and the loss scale",
    batch_size="micro_batch_size",
)


class MegatronFramework(Framework):
    """See :class:`ds_silent.framework.Framework`. Making one is a collective."""

    overlaps_backward = True

    def __init__(
        self, chunks: Sequence[Any], optimizer: Any, config: SilentConsistencyConfig, rows: int, accumulation: int
    ):
        self.words, self._optimizer, self._chunks = WORDS, optimizer, list(chunks)
        self._buffers = buffers = Buffers(chunks)
        named = list(zip(buffers.names, buffers.parameters, strict=True))
        super().__init__(module_of(chunks), named, chunks[0].dp_cp_group)
        self.counts.data_ranks = chunks[0].dp_group.size()
        # looked at once per step, so that nothing is known of each
        self.micro_batch_rows, self.micro_batches_at_once = rows * accumulation, accumulation
        self.aggregate_replicated = not buffers.distributed and not buffers.experts
        self.clip = float(optimizer.config.clip_grad)
        self.observes_applied = config.integrity.aggregation and config.direction.method != "off"
        self.peers: MegatronPeers = MegatronPeers(chunks, buffers, config.integrity.replica_interval, self.clip)
        self._forwards = 0  # of them: whose backward is to come
        self._begun: set[int] = set()  # chunks that have had a forward in it
        self._looked: set[int] = set()  # parameters, in it
        self._finished: set[int] = set()  # chunks whose reduction has ended in it

    # -- answers -------------------------------------------------------------------------------------------------

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        """A bucket is multiplied by 1/N in place and added up, in its own dtype."""
        own, ranks = coarsest(self._buffers.dtypes), float(dist.get_world_size(self.group))
        sums = bool(self._chunks[0].config.calculate_per_token_loss)
        return Arithmetic(own, accumulation=own, elements=elements, width=width, total=ranks if sums else 1.0)

    def seeks_loss_scale(self, applied: bool | None) -> bool:
        return self.counts.skipped and bool(self._optimizer.config.fp16)

    def reduced(self, index: int) -> Tensor | None:
        return self._buffers.whole(index) if self.aggregate_replicated else None

    def aggregated(self) -> Iterator[Part] | None:
        return ((piece.index, piece.start, self._buffers.values(piece)) for piece in self._buffers.share)

    def applied(self, optimizer: Any) -> Iterator[Part]:
        for outer, inner in inner_optimizers(self._optimizer):
            if inner is optimizer:
                yield from ((piece.index, piece.start, part) for piece, part in self._buffers.applied_of(outer))

    def scale(self, seen: Tensor | None) -> float | Tensor:
        factor: Tensor = self._optimizer.get_loss_scale()
        return factor.detach().float().reshape(())

    def optimizers(self) -> list[Any]:
        return [inner for _, inner in inner_optimizers(self._optimizer)]

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        """Return all but experts: those of other ranks are others."""
        experts = self._buffers.experts
        alike = [pair for pair in torch_common.parameters_of(self.module) if id(pair[1]) not in experts]
        inner = [
            inner
            for outer, inner in inner_optimizers(self._optimizer)
            if not self._buffers.distributed and not any(id(parameter) in experts for parameter, _ in trained_by(outer))
        ]
        return alike, lambda: torch_common.rest_of(self.module, inner)

    # -- connecting and disconnecting ----------------------------------------------------------------------------

    def connect(self, moments: Moments) -> None:
        self._moments, patches = moments, self.patches
        patches.hook(self._chunks[0].module.register_forward_pre_hook, self._forward, with_kwargs=True)
        patches.hook(self._chunks[-1].module.register_forward_hook, moments.post_forward)
        watch_losses(patches, self._chunks, moments.on_loss, self._handed)
        patches.before_backward(self._backward_begins)
        for group in self._buffers.bucket_groups:
            patches.wrap(group, "start_grad_sync", partial(self._reduction_starts, group))
        for chunk in self._chunks:
            # a buffer that weights are gathered through is empty when the forward has used them
            shared = getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
            register = chunk.module.register_forward_hook if shared else chunk.module.register_forward_pre_hook
            patches.hook(register, partial(self._chunk_begins, chunk))
            patches.around(chunk, "finish_grad_sync", after=partial(self._chunk_finished, chunk))
        for optimizer in self.optimizers():
            patches.hook(optimizer.register_step_pre_hook, moments.pre_optimizer_step)
        patches.wrap(self._optimizer, "step", self._step)

    def _handed(self, loss: Tensor) -> None:
        """The schedule divides what a loss function returns, but not a loss per token (megatron-core 0.11 to 0.16)."""
        per_token = bool(self._chunks[0].config.calculate_per_token_loss)
        self._moments.on_loss_handed(loss, None if per_token else Promise("Megatron-core's schedule"))

    def _chunk_begins(self, chunk: Any, *given: Any) -> None:
        if torch.is_grad_enabled() and id(chunk) not in self._begun:
            self._begun.add(id(chunk))
            self._moments.pre_step(partial(self._buffers.filled, chunk))

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.module.training = module.training
        if torch.is_grad_enabled():
            self._forwards += 1
        self._moments.pre_forward(module, args, kwargs)

    def _backward_begins(self, root: Any) -> None:
        """Tell of the chunks' own: one of them where a forward of theirs waits for it."""
        if self._forwards:
            self._forwards -= 1
            self._moments.pre_backward(root, own=True)

    def _reduction_starts(self, group: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        under_way = getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None
        if not under_way:  # else the call does nothing
            self._look_at(self._buffers.indices(group))
        return original(*args, **kwargs)

    def _look_at(self, indices: Sequence[int]) -> None:
        for index in indices:
            if index not in self._looked:
                self._looked.add(index)
                self._moments.on_gradient(index, self._buffers.accumulated(index))

    def _chunk_finished(self, chunk: Any) -> None:
        self._finished.add(id(chunk))
        if len(self._finished) == len(self._chunks):
            self._reduction_ended()

    def _reduction_ended(self) -> None:
        self._finished.clear()
        if self._looked:
            self._look_at(range(len(self.numels)))  # what was not reduced at all
            self._looked.clear()
            self._moments.post_backward()
            self._moments.post_reduction()

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._reduction_ended()
        if self.peers.is_part:  # Megatron has gone on: layer norms, tied embeddings, in ways that torch does not count
            increment_version(self._buffers.gradients)
        self._moments.pre_update()
        result = original(*args, **kwargs)
        self.counts.take(skipped=isinstance(result, tuple) and result[0] is False)
        self._forwards = 0
        self._begun.clear()
        self._moments.post_step()
        return result


def module_of(chunks: Sequence[Any]) -> nn.Module:
    """Return the only chunk's module, or one that holds all chunks'."""
    if len(chunks) == 1:
        module: nn.Module = chunks[0].module
        return module
    return nn.ModuleDict({f"chunk{number}": chunk.module for number, chunk in enumerate(chunks)})


_MEMBERS = ("buffers", "bucket_groups", "expert_parallel_buffers", "dp_cp_group", "finish_grad_sync", "tp_group")


def attach_megatron(
    model: Any,
    optimizer: Any,
    config: Given = None,
    *,
    loader: Any = None,
    accumulation: int | None = None,
) -> Observer | None:
    """Observe a Megatron-core training as :func:`ds_silent.attach` does."""
    needs("ds_silent.attach_megatron", "megatron")
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    try:
        inner = _checked(chunks, optimizer)
        block = given_block(config)
    except ConfigError as error:
        plain = not any(hasattr(chunk, "ddp_config") for chunk in chunks)
        return idle_or_refused(model, config, str(error), plain)
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
        words=WORDS,
        repairs=False,
        others=lambda tensor: id(tensor) in experts,
        config=lambda: [item for held in (optimizer.config, chunks[0].ddp_config) for item in _settings(held)],
    )
    places = {"tp": chunks[0].tp_group, "pp": chunks[0].pp_group}
    label = label_of({name: (group.rank(), group.size()) for name, group in places.items()})
    own = config if block is None else placed(block, label)
    return attach_wrapped(wrapped, inner, own, loader, accumulation or _micro_batches())


def _checked(chunks: Sequence[Any], optimizer: Any) -> list[Any]:
    """Return the ``torch.optim`` optimizers; raise :class:`ConfigError` for what cannot be observed."""
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
    """Return those of one of Megatron's configurations; of what is no plain value, its type."""
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


def taken_by_script() -> dict[str, int] | None:
    """Return steps and rows of a checkpoint that ``megatron.training`` goes on with, where it runs the loop.

    Read are ``iteration`` and ``consumed_train_samples`` of ``_GLOBAL_ARGS`` (0.15 and 0.16).
    """
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    taken = getattr(arguments, "iteration", None)
    if not isinstance(taken, int) or taken <= 0:
        return None
    return {"step": taken + 1, "samples": getattr(arguments, "consumed_train_samples", None) or 0}
