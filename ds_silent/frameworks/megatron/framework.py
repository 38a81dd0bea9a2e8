"""The chunks of one model in Megatron-core's ``DistributedDataParallel``: what they answer, and where the hooks are.

framework = MegatronFramework(chunks, optimizer, config, micro_batch_rows=4, accumulation=8)
framework.connect(moments)
framework.close(ended=True)          # chunks, buckets and optimizers are as they were

Gradients accumulate in ``parameter.main_grad``, where fused kernels write too: so each is looked at once per step,
whole, as the reduction of its bucket starts. The factor that it should be reduced with follows from the configuration,
never from the bucket's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ds_silent.config import SilentConsistencyConfig
from ds_silent.frameworks import replicated
from ds_silent.frameworks.base import Moments, Part, Ranks
from ds_silent.frameworks.megatron.buffers import Buffers, applied_gradient, coarsest, inner_optimizers, trained_by
from ds_silent.frameworks.megatron.losses import watch_losses
from ds_silent.frameworks.patches import Patches
from ds_silent.frameworks.shares import Slice, cut
from ds_silent.frameworks.torch_loop import rows_in
from ds_silent.maths.rounding_bound import Arithmetic
from ds_silent.ranks.communicator import own_group
from ds_silent.replicas.checksums import Items
from ds_silent.words import Words

WORDS = Words(
    framework="Megatron-core",
    begin="ds_silent.attach_megatron",
    another_reduction="try another megatron-core version, or without overlap_grad_reduce",
    update_settings="clip_grad and the loss scale",
    batch_size="micro_batch_size",
)


class MegatronFramework:
    """See :class:`ds_silent.frameworks.base.Framework`. Making one is a collective."""

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        config: SilentConsistencyConfig,
        micro_batch_rows: int,
        accumulation: int,
    ):
        self.words, self._optimizer, self._buffers = WORDS, optimizer, Buffers(chunks)
        self._chunks = list(chunks)
        self.module = module_of(chunks)
        self.names = self._buffers.names
        self.numels = [parameter.numel() for parameter in self._buffers.parameters]
        group = own_group(chunks[0].dp_cp_group)
        self.ranks = Ranks(group, group, self._buffers.parameters[0].device)
        self._ranks, self._data_ranks = dist.get_world_size(group), chunks[0].dp_group.size()
        self.micro_batch_rows = micro_batch_rows * accumulation
        self.micro_batches = self.boundaries = 1  # looked at once per step, so that nothing is known of each
        self.additive, self.overlapped, self.whole_at_hook = False, True, True
        self.aggregate_replicated = not self._buffers.distributed
        self.clip = float(optimizer.config.clip_grad)
        checks = config.integrity.aggregation and config.direction.method != "off"
        self.observes_applied = checks and not (self.clip and self._is_part)
        self._pieces = {piece.index: piece for piece in self._buffers.share}
        self._patches = Patches()
        self._moments: Moments | None = None
        self.step = 1
        self._rows = self._step_rows = self._last_rows = 0
        self._skipped = False
        self._looked: set[int] = set()  # parameters, in the step under way
        self._finished: set[int] = set()  # chunks whose reduction has ended in it
        self.beside: Callable[[int], object] = _nothing  # (step) before each, for what other groups hold alike

    @property
    def _is_part(self) -> bool:
        """Whether other ranks hold other parameters of the model: nobody here knows the norm that it is clipped by."""
        return any(group.size() > 1 for group in (self._chunks[0].tp_group, self._chunks[0].pp_group))

    # -- answers -------------------------------------------------------------------------------------------------

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        """A bucket is multiplied by 1/N in place and added up, in its own dtype."""
        own = coarsest(self._buffers.dtypes)
        sums = bool(self._chunks[0].config.calculate_per_token_loss)
        return Arithmetic(own, accumulation=own, elements=elements, width=width, total=self._ranks if sums else 1.0)

    @property
    def samples(self) -> int:
        return self._rows * int(self._data_ranks)

    @property
    def batch(self) -> float:
        return float(self._last_rows)

    def skipped(self, applied: bool | None) -> bool:
        return self._skipped and bool(self._optimizer.config.fp16)

    @property
    def update_skipped(self) -> bool:
        return self._skipped

    def is_boundary(self) -> bool:
        return True

    def accumulated(self, index: int) -> Tensor | None:
        """A gradient comes whole: nothing is to be added to it."""
        return None

    def reduced(self, index: int) -> Tensor | None:
        return self._buffers.whole(index) if self.aggregate_replicated else None

    def aggregated(self) -> Iterator[Part] | None:
        return ((piece.index, piece.start, self._buffers.values(piece)) for piece in self._buffers.share)

    def applied(self, optimizer: Any) -> Iterator[Part]:
        for outer, inner in inner_optimizers(self._optimizer):
            if inner is optimizer:
                for parameter, stands_for_it in trained_by(outer):
                    index, values = self._buffers.index_of(parameter), applied_gradient(stands_for_it)
                    piece = None if index is None else self._pieces.get(index)
                    if piece is not None and values is not None:
                        own = piece if not self._buffers.distributed else Slice(piece.index, 0, piece.numel)
                        part = cut(values, own)
                        assert part is not None
                        yield piece.index, piece.start, part

    def scale(self, seen: Tensor | None) -> float | Tensor:
        factor: Tensor = self._optimizer.get_loss_scale()
        return factor.detach().float().reshape(())

    def gram(self) -> Tensor | None:
        return None

    def optimizers(self) -> list[Any]:
        return [inner for _, inner in inner_optimizers(self._optimizer)]

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        module, optimizers = self.module, self.optimizers()
        return replicated.parameters_of(module), lambda: [
            *replicated.buffers_of(module),
            *(() if self._buffers.distributed else replicated.masters_of(module, optimizers)),
            *(() if self._buffers.distributed else replicated.states_of(optimizers)),
        ]

    def counted(self) -> dict[str, int]:
        return {"step": self.step, "rows": self._rows}

    def count_on(self, counted: dict[str, int]) -> None:
        self.step, self._rows = int(counted["step"]), int(counted["rows"])

    # -- connecting and disconnecting ----------------------------------------------------------------------------

    def connect(self, moments: Moments) -> None:
        self._moments, patches = moments, self._patches
        patches.add(self._chunks[0].module.register_forward_pre_hook(self._forward, with_kwargs=True))
        patches.add(self._chunks[-1].module.register_forward_hook(moments.forwarded))
        watch_losses(patches, self._chunks, moments.loss)
        for group in self._buffers.groups:
            patches.wrap(group, "start_grad_sync", partial(self._reduction_starts, group))
        for chunk in self._chunks:
            patches.around(chunk, "finish_grad_sync", _nothing, partial(self._chunk_finished, chunk))
        for optimizer in self.optimizers():
            patches.add(optimizer.register_step_pre_hook(moments.applying))
        patches.wrap(self._optimizer, "step", self._step)

    def close(self, ended: bool) -> None:
        self._patches.undo()

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        assert self._moments is not None
        self.module.training = module.training
        if torch.is_grad_enabled():
            self._step_rows += self._moments.together.alone(rows_in, args, kwargs) or 0
        self._moments.forward(module, args, kwargs)

    def _reduction_starts(self, group: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        under_way = getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None
        if not under_way:  # else the call does nothing
            self._look_at(self._buffers.indices(group))
        return original(*args, **kwargs)

    def _look_at(self, indices: Sequence[int]) -> None:
        assert self._moments is not None
        for index in indices:
            if index not in self._looked:
                self._looked.add(index)
                self._moments.gradient(index, self._buffers.accumulated(index))

    def _chunk_finished(self, chunk: Any) -> None:
        self._finished.add(id(chunk))
        if len(self._finished) == len(self._chunks):
            self._reduction_ended()

    def _reduction_ended(self) -> None:
        assert self._moments is not None
        self._finished.clear()
        if self._looked:
            self._look_at(range(len(self.numels)))  # what was not reduced at all
            self._looked.clear()
            self._moments.micro_batch_ended()
            self._moments.reduced()

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._moments is not None
        self._reduction_ended()
        if self._is_part:  # Megatron has gone on: layer norms and tied embeddings, in ways that torch does not count
            increment_version(self._buffers.gradients)
        self._moments.together.alone(self.beside, self.step)
        self._moments.before_update()
        result = original(*args, **kwargs)
        self._skipped = isinstance(result, tuple) and result[0] is False
        self._rows, self._last_rows, self._step_rows = self._rows + self._step_rows, self._step_rows, 0
        self.step += 1
        self._moments.updated()
        return result


def module_of(chunks: Sequence[Any]) -> nn.Module:
    """The only chunk's module, or one that holds all chunks'."""
    if len(chunks) == 1:
        module: nn.Module = chunks[0].module
        return module
    return nn.ModuleDict({f"chunk{number}": chunk.module for number, chunk in enumerate(chunks)})


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
