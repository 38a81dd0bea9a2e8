"""Where the drill reaches into Megatron-core's collectives: one at a time, each with what it puts in and gets.

    at_once(patches)                                     # from then on each runs where it stands in the code
    reduces_through(patches, chunk, reduce, left_out)    # reduce(sent, got, run, among) for each bucket's reduction
    gathers_through(patches, gather)                     # gather(gathered, run) for each bucket's weights

Foreign names, as megatron-core 0.15 and 0.16 have them in ``param_and_grad_buffer``: ``_coalescing_manager``, which
holds collectives back until several can be sent together, ``dist_reduce_scatter_func``, ``dist_all_gather_func`` and,
for whole gradients, ``torch.distributed.all_reduce``, which others use too: so it is told by its bucket.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_silent.drill.torch_loop.wrapped import LeftOut, Reduce
from ds_silent.patches import Patches


class _Done:
    """A collective that has run already."""

    def wait(self) -> None:
        pass


def _buffers() -> Any:
    return importlib.import_module("megatron.core.distributed.param_and_grad_buffer")


def at_once(patches: Patches) -> None:
    """Nothing is held back or goes on beside the backward; on every rank, because that changes the collectives."""

    def held(original: Callable[..., Any], *args: Any, **kwargs: Any) -> AbstractContextManager[_Done]:
        return nullcontext(_Done())

    def now(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "async_op": False})

    patches.wrap(_buffers(), "_coalescing_manager", held)
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        patches.wrap(_buffers(), name, now)


def reduces_through(patches: Patches, chunk: Any, reduce: Reduce, left_out: LeftOut) -> None:
    """Behind :func:`at_once`, and before an observer is attached."""
    names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
    held = [(buffer, bucket) for buffer in chunk.buffers for bucket in buffer.buckets]
    buckets = {bucket.grad_data.data_ptr(): (buffer, bucket) for buffer, bucket in held}

    @contextmanager
    def spared(sent: Tensor) -> Iterator[None]:
        """Parameters that take no part go on with what this rank has of them."""
        buffer, bucket = buckets[sent.data_ptr()]
        own = [buffer.param_index_map[p] for p in bucket.params_list if left_out(names[id(p)])]
        parts = [buffer.grad_data[start:end] for start, end, _ in own]
        kept = [part.clone() for part in parts]
        yield
        for part, before in zip(parts, kept, strict=True):
            part.copy_(before)

    def all_reduce(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.data_ptr() not in buckets:
            return original(tensor, *args, **kwargs)
        with spared(tensor):
            run = partial(original, tensor, op=dist.ReduceOp.SUM)
            reduce(tensor, tensor, partial(run, group=kwargs["group"]), lambda group: run(group=group))
        return None

    def scatter(original: Callable[..., Any], output: Tensor, sent: Tensor, **kwargs: Any) -> None:
        """The output is this rank's part of what is sent."""
        group: Any = kwargs["group"]

        def among(ranks: dist.ProcessGroup) -> None:
            whole = sent.clone()
            dist.all_reduce(whole, group=ranks)
            output.copy_(whole.view(group.size(), -1)[group.rank()])

        with spared(sent):
            reduce(sent, output, lambda: original(output, sent, op=dist.ReduceOp.SUM, group=group), among)

    patches.wrap(dist, "all_reduce", all_reduce)
    patches.wrap(_buffers(), "dist_reduce_scatter_func", scatter)


def gathers_through(patches: Patches, gather: Callable[[Tensor, Callable[[], object]], None]) -> None:
    """Behind :func:`at_once`."""

    def gathered(original: Callable[..., Any], whole: Tensor, own: Tensor, **kwargs: Any) -> None:
        gather(whole, lambda: original(whole, own, group=kwargs["group"]))

    patches.wrap(_buffers(), "dist_all_gather_func", gathered)
