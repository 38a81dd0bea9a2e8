"""Where a model chunk's gradients lie: Megatron keeps them in buffers, cut into buckets, which it reduces in groups.

buffers = Buffers(chunks)
buffers.names, buffers.parameters                  # trainable, in the order of the chunks
buffers.share                                      # pieces of the aggregate that this rank answers for
buffers.values(piece)                              # flat, as they lie in the buffer

A bucket's own ``param_to_index`` leaves the padding out (0.16); the buffer's ``param_index_map`` has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ds_silent.frameworks.shares import Slice, nth_share
from ds_silent.maths.rounding_bound import UNIT_ROUNDOFF


class Buffers:
    """Of all chunks of this rank.

    Attributes:
        chunks: as the script holds them.
        names: of the trainable parameters; of several chunks, with the chunk's number.
        parameters: the same.
        share: what this rank answers for.
        distributed: the optimizer is: a rank holds its part of the aggregate only.
        dtypes: of the gradients.
    """

    def __init__(self, chunks: Sequence[Any]):
        self.chunks = list(chunks)
        named = [pair for number, chunk in enumerate(chunks) for pair in self._named(number, chunk)]
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.distributed = bool(self.chunks[0].ddp_config.use_distributed_optimizer)
        self._places: dict[int, tuple[Tensor, int]] = {}  # buffer and first element in it, of each parameter
        for _, buffer in self._buffers():
            for parameter, (start, _, _) in buffer.param_index_map.items():
                self._places[self._index[id(parameter)]] = buffer.grad_data, start
        self.dtypes = {grad.dtype for grad, _ in self._places.values()}
        self.share = sorted(self._shard(), key=lambda piece: piece.index) if self.distributed else self._nth()

    def _named(self, number: int, chunk: Any) -> Iterator[tuple[str, Tensor]]:
        prefix = f"chunk{number}." if len(self.chunks) > 1 else ""
        return ((prefix + name, p) for name, p in chunk.module.named_parameters() if p.requires_grad)

    def _buffers(self) -> Iterator[tuple[Any, Any]]:
        for chunk in self.chunks:
            for buffer in chunk.buffers:
                yield chunk, buffer

    def _nth(self) -> list[Slice]:
        group = self.chunks[0].dp_cp_group
        return nth_share([parameter.numel() for parameter in self.parameters], group.rank(), group.size())

    def _shard(self) -> Iterator[Slice]:
        """Each bucket is cut into as many equal parts as ranks. Several instances hold the same: the first answers."""
        for chunk, buffer in self._buffers():
            group = chunk.intra_dp_cp_group
            if chunk.dp_cp_group.rank() >= group.size() and chunk.ddp_config.num_distributed_optimizer_instances > 1:
                continue
            for bucket in buffer.buckets:
                part = bucket.grad_data.numel() // group.size()
                begin = bucket.offset + group.rank() * part
                for parameter in bucket.params_list:
                    start, end, _ = buffer.param_index_map[parameter]
                    low, high = max(start, begin), min(end, begin + part)
                    if low < high:
                        yield Slice(self._index[id(parameter)], low - start, high - low)

    @property
    def gradients(self) -> list[Tensor]:
        """The buffers themselves."""
        return [buffer.grad_data for _, buffer in self._buffers()]

    @property
    def groups(self) -> list[Any]:
        """Whose buckets are reduced together, of all chunks."""
        return [group for chunk in self.chunks for group in chunk.bucket_groups]

    def indices(self, group: Any) -> list[int]:
        """Of the parameters that a group of buckets holds."""
        return [self._index[id(parameter)] for bucket in group.buckets for parameter in bucket.params_list]

    def accumulated(self, index: int) -> Tensor:
        """A parameter's gradient of all micro-batches until now, whole; after the reduction, what this rank has of it.

        Not the buffer: where a parameter is accumulated apart, Megatron fills that as it reduces.
        """
        gradient: Tensor = self.parameters[index].main_grad  # type: ignore[attr-defined]
        return gradient

    def values(self, piece: Slice) -> Tensor:
        """What the buffer holds of a piece, flat."""
        grad, start = self._places[piece.index]
        return grad[start + piece.start : start + piece.start + piece.numel]

    def whole(self, index: int) -> Tensor:
        """What the buffer holds of a parameter, flat."""
        return self.values(Slice(index, 0, self.parameters[index].numel()))

    def index_of(self, parameter: Tensor) -> int | None:
        """None for what is not trained here."""
        return self._index.get(id(parameter))


def inner_optimizers(optimizer: Any) -> list[tuple[Any, Any]]:
    """(Megatron's optimizer, the ``torch.optim`` optimizer in it), without those that have nothing to train."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [(one, one.optimizer) for one in chained if one.optimizer is not None]


def trained_by(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(a model's parameter, what stands for it or for this rank's shard of it in the ``torch.optim`` optimizer)."""
    if hasattr(optimizer, "shard_fp32_groups"):  # distributed
        masters, halves = optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups
        held = halves if any(master is None for group in masters for master in group) else masters
        kinds = [(optimizer.model_float16_groups, held), (optimizer.model_fp32_groups, optimizer.shard_fp32_groups)]
    elif hasattr(optimizer, "fp32_from_float16_groups"):
        kinds = [(optimizer.float16_groups, optimizer.fp32_from_float16_groups)]
        kinds += [(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups)]
    else:
        groups = [group["params"] for group in optimizer.optimizer.param_groups]
        kinds = [(groups, groups)]
    for models, inners in kinds:
        yield from zip(chain.from_iterable(models), chain.from_iterable(inners), strict=True)


def applied_gradient(parameter: Tensor) -> Tensor | None:
    """What a ``torch.optim`` optimizer is about to apply; optimizers that are aware of precision keep it elsewhere."""
    decoupled = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if decoupled is None else decoupled


def coarsest(dtypes: set[torch.dtype]) -> torch.dtype:
    """In which gradients are reduced."""
    return max(dtypes, key=UNIT_ROUNDOFF.__getitem__, default=torch.float32)
