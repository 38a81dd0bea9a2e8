"""Who holds the rest of a model, and who holds the same once more: tensor- and pipeline-parallel peers, and experts.

peers = MegatronPeers(chunks, buffers, every=100, clip=1.0)
peers.is_part                # others hold parameters that this rank's data-parallel group does not
peers.in_norm                # parameters that count in the whole model's norm: each once in the model
peers.compare(step)          # events: what several groups should hold alike and do not
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_silent.distributed.parts import listed
from ds_silent.exchange.whole_model import WholeModel
from ds_silent.framework import Peers
from ds_silent.frameworks.megatron.buffers import Buffers
from ds_silent.records import Event
from ds_silent.replicas.duplicates import SHOWN, Duplicates


class MegatronPeers(Peers):
    """See the module docstring.

    Args:
        every: steps between comparisons, 0 for none.
        clip: largest norm of the whole model's gradient, 0 for none.
    """

    def __init__(self, chunks: Sequence[Any], buffers: Buffers, every: int, clip: float):
        super().__init__()
        self._chunks, self._buffers = chunks, buffers
        self._tensor, self._pipeline = chunks[0].tp_group, chunks[0].pp_group
        self.is_part = self._tensor.size() > 1 or self._pipeline.size() > 1
        self._is_first = chunks[0].dp_cp_group.rank() == 0
        if self.is_part and self._is_first:
            from megatron.core import parallel_state

            ranks = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
            self.model = WholeModel(ranks, told_by=dist.get_process_group_ranks(self._pipeline)[-1])
        if self.is_part and clip:
            self.in_norm = self._in_norm()
        self._unreduced = tuple(buffers.unreduced)
        self.duplicates = list(self._made(every)) if every else []

    def _in_norm(self) -> frozenset[int]:
        """Count what all hold alike on one tensor-parallel rank, a tied embedding where it is not ``shared``."""
        from megatron.core import parallel_state

        first, experts = self._tensor.rank() == 0, self._buffers.experts
        expert_first = not experts or parallel_state.get_expert_tensor_parallel_rank() == 0
        return frozenset(
            index
            for index, p in enumerate(self._buffers.parameters)
            if not getattr(p, "shared", False) and (_is_cut(p) or (expert_first if id(p) in experts else first))
        )

    def compare(self, step: int) -> list[Event]:
        """Tell once what no buffer holds, and what differs as a step begins."""
        unreduced, self._unreduced = self._unreduced, ()
        events = [_in_no_buffer(step, unreduced)] if unreduced else []
        return [*events, *super().compare(step)]

    def _made(self, every: int) -> Iterator[Duplicates]:
        """Yield those of other groups on the first rank of each: its own group sees the rest. Experts on each."""
        named = [(name, p) for chunk in self._chunks for name, p in chunk.module.named_parameters()]
        experts = [(name, p) for name, p in named if id(p) in self._buffers.experts]
        if experts:
            ranks = dist.get_process_group_ranks(self._chunks[0].dp_cp_group)
            alike = dist.get_process_group_ranks(self._chunks[0].expt_dp_group)
            yield Duplicates("experts", ranks, experts, every, alike)
        whole = [(name, p) for name, p in named if not _is_cut(p) and id(p) not in self._buffers.experts]
        if self._is_first and self._tensor.size() > 1 and whole:
            ranks = dist.get_process_group_ranks(self._tensor)
            yield Duplicates("tensor-parallel duplicates", ranks, whole, every)
        tied = [(name, p) for name, p in named if getattr(p, "shared_embedding", False)]
        if self._is_first and self._pipeline.size() > 1 and tied:
            from megatron.core import parallel_state

            group = parallel_state.get_embedding_group(check_initialized=False)
            if group is not None:
                yield Duplicates("tied embeddings", dist.get_process_group_ranks(group), tied[:1], every)


def _in_no_buffer(step: int, names: Sequence[str]) -> Event:
    where = listed(names, SHOWN)
    message = f"No gradient buffer holds {where}, so nobody reduces its gradient: each rank trains it alone."
    remedy = "Make parameters trainable before DistributedDataParallel wraps the model."
    return Event(step, "unreduced-gradient", "error", (), where, None, None, message, remedy)


def _is_cut(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))
