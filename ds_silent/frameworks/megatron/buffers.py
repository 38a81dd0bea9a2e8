"""Where a model chunk's gradients lie: Megatron keeps them in buffers, cut into buckets, which it reduces in groups.

buffers = Buffers(chunks)
buffers.names, buffers.parameters                  # trainable, in the order of the chunks
buffers.share                                      # pieces of the aggregate that this rank answers for
buffers.values(piece)                              # flat, as they lie in the buffer

Experts are reduced among the ranks that hold the same ones, but divided as all others are: by the ranks that reduce
those. So over these the pieces of all aggregates still add up to the mean of the ranks' gradients, whoever holds which.

A bucket's own ``param_to_index`` leaves the padding out (0.16); the buffer's ``param_index_map`` has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from ds_silent.frameworks.torch_common import Slice, cut, nth_share


class Buffers:
    """Of all chunks of this rank.

    Attributes:
        chunks: as the script holds them.
        names: of the trainable parameters; of several chunks, with the chunk's number.
        parameters: the same.
        unreduced: names of those that are in no buffer.
        experts: ids of the parameters that are reduced among the ranks which hold the same experts.
        share: what this rank answers for.
        distributed: the optimizer is: a rank holds its part of the aggregate only.
        dtypes: of the gradients.
    """

    def __init__(self, chunks: Sequence[Any]):
        self.chunks = list(chunks)
        self.distributed = bool(chunks[0].ddp_config.use_distributed_optimizer)
        held = [
            (chunk, buffer, expert) for chunk in chunks for expert in (False, True) for buffer in _of(chunk, expert)
        ]
        lies = {id(p): (buffer, start) for _, buffer, _ in held for p, (start, *_) in buffer.param_index_map.items()}
        self.experts = frozenset(id(p) for _, buffer, expert in held if expert for p in buffer.param_index_map)
        named = [pair for number, chunk in enumerate(chunks) for pair in self._named(number, chunk)]
        self.unreduced = [name for name, p in named if id(p) not in lies]
        self.names = [name for name, p in named if id(p) in lies]
        self.parameters = [p for _, p in named if id(p) in lies]
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._places = [lies[id(parameter)] for parameter in self.parameters]
        self.gradients = [buffer.grad_data for _, buffer, _ in held]
        self.dtypes = {gradient.dtype for gradient in self.gradients}
        pieces = chain.from_iterable(map(self._shard, *zip(*held, strict=True))) if self.distributed else self._nth()
        self.share = sorted(pieces, key=lambda piece: piece.index)

    def _named(self, number: int, chunk: Any) -> Iterator[tuple[str, Tensor]]:
        prefix = f"chunk{number}." if len(self.chunks) > 1 else ""
        return ((prefix + name, p) for name, p in chunk.module.named_parameters() if p.requires_grad)

    def _nth(self) -> Iterator[Slice]:
        for expert in (False, True):
            own = [index for index, p in enumerate(self.parameters) if (id(p) in self.experts) == expert]
            group, _ = _groups(self.chunks[0], expert)
            for piece in nth_share([self.parameters[index].numel() for index in own], group.rank(), group.size()):
                yield Slice(own[piece.index], piece.start, piece.numel)

    def _shard(self, chunk: Any, buffer: Any, expert: bool) -> Iterator[Slice]:
        """Cut each bucket into as many equal parts as ranks. Several instances hold the same: the first answers."""
        whole, group = _groups(chunk, expert)
        if whole.rank() >= group.size():
            return
        for bucket in buffer.buckets:
            part = bucket.grad_data.numel() // group.size()
            begin = bucket.offset + group.rank() * part
            for parameter in bucket.params_list:
                start, end, _ = buffer.param_index_map[parameter]
                low, high = max(start, begin), min(end, begin + part)
                if low < high:
                    yield Slice(self._index[id(parameter)], low - start, high - low)

    @property
    def bucket_groups(self) -> Iterator[Any]:
        """Yield groups of buckets that are reduced together, of all chunks."""
        return (
            group for chunk in self.chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        )

    def indices(self, group: Any) -> list[int]:
        """Return those of the parameters that a group of buckets holds."""
        return [self._index[id(parameter)] for bucket in group.buckets for parameter in bucket.params_list]

    def accumulated(self, index: int) -> Tensor:
        """Return a parameter's gradient of all micro-batches, whole; after the reduction, what this rank has of it.

        Not the buffer: where a parameter is accumulated apart, Megatron fills that as it reduces.
        """
        gradient: Tensor = self.parameters[index].main_grad  # type: ignore[attr-defined]
        return gradient

    def filled(self, chunk: Any) -> Iterator[tuple[int, Tensor]]:
        """Yield the parameters' gradients of those buffers of a chunk that are not empty. Waits for the device.

        Megatron waits for it in each step too, for the norm.
        """
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.grad_data.any():
                yield from ((self._index[id(p)], self.accumulated(self._index[id(p)])) for p in buffer.param_index_map)

    def values(self, piece: Slice) -> Tensor:
        """Return what the buffer holds of a piece, flat."""
        buffer, start = self._places[piece.index]
        values: Tensor = buffer.grad_data[start + piece.start : start + piece.start + piece.numel]
        return values

    def whole(self, index: int) -> Tensor:
        """Return what the buffer holds of a parameter, flat."""
        return self.values(Slice(index, 0, self.parameters[index].numel()))

    def applied_of(self, optimizer: Any) -> Iterator[tuple[Slice, Tensor]]:
        """Yield what one of Megatron's optimizers is about to apply of this rank's share, flat."""
        pieces = {piece.index: piece for piece in self.share}
        for parameter, stands_for_it in trained_by(optimizer):
            piece, values = pieces.get(self._index.get(id(parameter), -1)), _applied(stands_for_it)
            if piece is not None and values is not None:
                yield piece, values.detach().reshape(-1) if self.distributed else _part(values, piece)


def _of(chunk: Any, expert: bool) -> list[Any]:
    return list(chunk.expert_parallel_buffers if expert else chunk.buffers)


def _groups(chunk: Any, expert: bool) -> tuple[Any, Any]:
    """Return (who reduces together, those of them who share one instance of the optimizer)."""
    if expert:
        return chunk.expt_dp_group, chunk.intra_expt_dp_group
    return chunk.dp_cp_group, chunk.intra_dp_cp_group


def inner_optimizers(optimizer: Any) -> list[tuple[Any, Any]]:
    """Return (Megatron's optimizer, the ``torch.optim`` one in it), without those that have nothing to train."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [(one, one.optimizer) for one in chained if one.optimizer is not None]


def trained_by(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (a model's parameter, what stands for it or this rank's shard of it in the ``torch.optim`` optimizer)."""
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


def _applied(parameter: Tensor) -> Tensor | None:
    """Return what is applied: optimizers that are aware of precision keep it elsewhere."""
    decoupled = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if decoupled is None else decoupled


def _part(values: Tensor, piece: Slice) -> Tensor:
    part = cut(values, piece)
    assert part is not None
    return part
