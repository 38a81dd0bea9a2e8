"""``"reduction": "ordered"``: DeepSpeed's gradient reduction, replaced in stages 0 and 1.

    reduction = OrderedReduction(engine, parameters, share, config, group)
    reduction.connect()              # from the first step on, whether a step is measured or not
    reduction.look = function        # optional: look() is called before the exchange
    reduction.reduce()               # once more, as long as the step's local sums are kept
    reduction.close()                # DeepSpeed reduces again

At the end of every micro-batch's backward the gradients are taken away from DeepSpeed and become leaves of
:class:`ds_silent.ordered.tree.LocalTree`. At the boundary the local sums are exchanged, and the means are put where
DeepSpeed expects them: in ``parameter.grad`` (stage 0), or in ``averaged_gradients`` (stage 1).

Its wrappers are no part of the observer's: when the observer breaks and switches itself off, the training's arithmetic
must not change. So nothing here is guarded either; an error ends the training, as one in DeepSpeed's reduction would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig
from ds_silent.frameworks.torch_common import Slice
from ds_silent.ordered.exchange import LongVector, OrderedExchange, covers, gather_runs, joined
from ds_silent.ordered.tree import Gradients, LocalTree, global_norm
from ds_silent.patches import Patches

Look = Callable[[], bool | None]
"""``look()``: all gradients of a micro-batch are there; whether the ranks' inner products are wanted."""


class OrderedReduction:
    """See the module docstring. Making one is a collective, and so is the boundary of every step.

    Args:
        parameters: all trainable ones.
        share: what this rank answers for; every element is in one rank's share. None, on all ranks, if it is hidden.

    Attributes:
        look: see :data:`Look`; the observer's, and None when it is off.
        gram: this rank's part of the inner products of this step's local gradients, where ``look`` wanted them.
    """

    def __init__(
        self,
        engine: Any,
        parameters: list[Any],
        share: list[Slice] | None,
        config: SilentConsistencyConfig,
        group: dist.ProcessGroup,
    ):
        self._engine, self._parameters, self._share = engine, parameters, share or []
        numels = [parameter.numel() for parameter in parameters]
        self._offsets = [sum(numels[:index]) for index in range(len(numels))]
        self._group, self._device = group, torch.device(engine.device)
        self._steps = int(engine.gradient_accumulation_steps())
        self._partitioned = isinstance(engine.optimizer, ZeROOptimizer)
        self._keeps = config.respond.on_aggregation_error == "retry"
        self._tree = LocalTree(self._steps, config.ordered.micro_batches)
        own = joined([(self._offsets[piece.index] + piece.start, piece.numel) for piece in self._share])
        runs = [] if share is None else gather_runs(own, group, self._device)
        if not covers(runs, sum(numels)):
            raise ConfigError(
                f'{BLOCK}.reduction "ordered" cannot see which rank owns which gradient in DeepSpeed '
                f"{deepspeed.__version__}, ZeRO stage {engine.zero_optimization_stage()}; give the optimizer all "
                'trainable parameters, or use stage 0 or "native"'
            )
        dtypes = {parameter.dtype for parameter in parameters}
        narrow = dtypes.pop() if dtypes in ({torch.float32}, {torch.bfloat16}) else torch.float32
        direction = config.direction
        exact = direction.method == "exact" or (direction.method != "off" and direction.exact_interval > 0)
        self._exchange = OrderedExchange(
            runs,
            group,
            self._device,
            config.ordered.memory_mb,
            config.ordered.micro_batches,
            gathered=None if self._partitioned else narrow,
            gram=exact,
        )
        self._sums: Gradients | None = None  # this rank's, of the step; until the optimizer has run, if they are kept
        self.look: Look | None = None
        self.gram: Tensor | None = None
        self._patches, self._connected = Patches(), False

    @property
    def local_bytes(self) -> int:
        """Count the bytes of the local sums that are kept."""
        return sum(value.nbytes for value in self._sums or [] if value is not None)

    def held(self, index: int) -> Tensor | None:
        """Return a parameter's local gradient, if any: at the boundary the step's sum, before it what autograd has."""
        if self._sums is not None:
            return self._sums[index]
        gradient: Tensor | None = self._parameters[index].grad
        return gradient

    # -- connecting and disconnecting ---------------------------------------------------------------------------

    def connect(self) -> None:
        """Put the wrappers on; again only after :meth:`close`."""
        if self._connected:
            return
        self._connected = True
        self._wrap(self._engine, "allreduce_gradients", self._allreduce_gradients)
        self._wrap(self._engine, "_take_model_step", self._take_model_step)
        self._wrap(self._engine, "no_sync", self._refuse)
        if hasattr(self._engine, "coalesce_grad_reduction"):  # since 0.19
            self._wrap(self._engine, "coalesce_grad_reduction", self._refuse)
        if self._partitioned:
            self._wrap(self._engine.optimizer, "average_tensor", _nothing)
            if self._engine.gradient_clipping() > 0:
                self._wrap(self._engine.optimizer, "scaled_global_norm", self._global_norm)
        else:
            self._wrap(self._engine, "clip_fp32_gradients", self._clip)

    def _wrap(self, instance: Any, name: str, wrapper: Callable[..., Any]) -> None:
        if not hasattr(instance, name):
            raise ConfigError(
                f'{BLOCK}.reduction "ordered" needs {type(instance).__name__}.{name}, which DeepSpeed '
                f'{deepspeed.__version__} does not have; use DeepSpeed 0.16.9 to 0.19.8, or "native"'
            )
        self._patches.wrap(instance, name, wrapper)

    def close(self) -> None:
        """Let DeepSpeed reduce again; in the middle of a step it gets back what was taken so far."""
        if not self._connected:
            return
        self._connected = False
        self._patches.undo()
        self.release()
        taken = self._tree.take_incomplete()
        for parameter, value in zip(self._parameters, taken or [], strict=bool(taken)):
            if value is not None:
                parameter.grad = value.to(parameter.dtype)

    # -- the step ---------------------------------------------------------------------------------------------------

    def _allreduce_gradients(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Called at the end of every backward, after all gradients have been accumulated (0.16.9 to 0.19.8)."""
        boundary = bool(self._engine.is_gradient_accumulation_boundary())
        self._take_leaf(boundary)
        exact = bool(self.look()) if self.look is not None else False
        if boundary:
            self.gram = None
        if self._partitioned:
            original(*args, **kwargs)  # finds no gradients, so averaged_gradients are zeros; sets DeepSpeed's flags
        if boundary:
            self.gram = self.reduce(gram=exact)
            if not self._keeps:
                self.release()

    def _take_leaf(self, boundary: bool) -> None:
        self.release()
        if self._tree.count == self._steps or (boundary and self._tree.count != self._steps - 1):
            raise ConfigError(
                f'{BLOCK}.reduction "ordered" adds up gradient_accumulation_steps micro-batches per step, '
                f"{self._steps}, got {self._tree.count + 1}; call backward once per micro-batch, and leave the "
                "boundary to DeepSpeed"
            )
        leaf: Gradients = []
        for parameter in self._parameters:
            leaf.append(parameter.grad)
            parameter.grad = None
        self._tree.push(leaf)
        if boundary:
            self._sums = self._tree.take()

    def reduce(self, gram: bool = False) -> Tensor | None:
        """Exchange the local sums and write the means; a collective, and again with the same result.

        Again only where the sums are kept (``respond.on_aggregation_error "retry"``), until the optimizer has run.
        """
        assert self._sums is not None
        result = self._partition() if self._partitioned else LongVector(self._offsets, self._gradients(self._sums))
        return self._exchange.mean(LongVector(self._offsets, self._sums), result, gram)

    def release(self) -> None:
        """Forget the step's local sums."""
        self._sums = None

    def _gradients(self, sums: Gradients) -> list[Tensor | None]:
        """``parameter.grad``. The rank's own sums have been sent when a mean is written, so their memory will do."""
        for parameter, value in zip(self._parameters, sums, strict=True):
            if parameter.grad is None:
                reuses = value is not None and value.dtype == parameter.dtype and not self._keeps
                parameter.grad = value if reuses else torch.empty_like(parameter.data, memory_format=_CONTIGUOUS)
        return [parameter.grad for parameter in self._parameters]

    def _partition(self) -> LongVector:
        """``_hp_mapping.get_lp_grad_fragment``: for each parameter that this rank owns a piece of, its place in
        ``averaged_gradients``, which the optimizer reads (``deepspeed/utils/tensor_fragment.py``, 0.16.9 to 0.19.8)."""
        offsets, places = [], []
        for piece in self._share:
            parameter = self._parameters[piece.index]
            offsets.append(self._offsets[piece.index] + piece.start)
            places.append(parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group))
        return LongVector(offsets, places)

    def _take_model_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.release()
        return result

    def _refuse(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f'{BLOCK}.reduction "ordered" must see every micro-batch on its own, which no_sync() and '
            "coalesce_grad_reduction() prevent; set gradient_accumulation_steps instead and call backward for each"
        )

    # -- clipping, where the norm's bits would depend on how the gradient is shared -----------------------------------

    def _global_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``scaled_global_norm`` adds up the squares of each rank's partition, and then those of the ranks."""
        pieces = [piece for group in self._engine.optimizer.averaged_gradients.values() for piece in group]
        norm = global_norm(pieces, self._group, self._device)
        return original(*args, **kwargs) if norm is None else torch.tensor(norm, device=self._device)

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """``clip_fp32_gradients`` averages over the ranks a norm that is the same on all, which may round it."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.stack([gradient.float().norm() for gradient in gradients]).norm()
        factor = torch.clamp(self._engine.gradient_clipping() / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)


_CONTIGUOUS = torch.contiguous_format


def _nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """``average_tensor`` (0.16.9 to 0.19.8) would all-reduce the bucket, which is empty."""
