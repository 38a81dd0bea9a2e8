"""Attach what PyTorch itself trains data-parallel, and what DDP, FSDP2 and Megatron-core answer alike."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig
from ds_silent.distributed.communicator import own_group
from ds_silent.exchange.collectives import largest
from ds_silent.extras import is_first, print_without_traceback
from ds_silent.framework import Framework, Moments, Promise
from ds_silent.kernels.checksums import Items, Replica
from ds_silent.maths.sketch import offsets_of
from ds_silent.observing import start
from ds_silent.observing.observe import Given, Subject, given_block, idle_observer, observe, told_in_a_sentence
from ds_silent.observing.observer import Observer
from ds_silent.observing.start import refuse_sparse_gradients, refuse_too_few_ranks
from ds_silent.patches import Patches
from ds_silent.preflight.inventory import Training, rows_per_batch
from ds_silent.preflight.items import Item
from ds_silent.preflight.settings import groups_of
from ds_silent.replicas.compare import batch_statistics_of
from ds_silent.replicas.own_parts import BUFFER, STATE
from ds_silent.text import TORCH, Words, shown

ROWS = 64  # of a micro-batch, where nobody says how many: room for the rows' ids


@dataclass(frozen=True)
class Wrapped:
    """A model that torch trains data-parallel."""

    name: str  # of what wraps it
    held: Any  # what the script holds
    module: nn.Module  # whose parameters are trained
    group: Callable[[], dist.ProcessGroup]  # that reduces; raises ConfigError where there is no single one
    framework: Callable[[Sequence[Any], SilentConsistencyConfig, int, int], Framework]  # optimizers, .., rows, steps
    facts: Callable[[], dict[str, Any]] = dict  # what else the ranks' collectives follow from
    sharded: bool = False  # no rank holds a whole parameter
    words: Words = TORCH
    repairs: bool = True  # whole replicas can be written between two steps
    others: Callable[[Tensor], bool] = lambda tensor: False  # not every rank has this one: experts
    config: Callable[[], list[Item]] = list  # of what the user has configured, which every rank must have alike


def attach_wrapped(
    wrapped: Wrapped,
    optimizer: Any,
    config: Given = None,
    loader: Any = None,
    accumulation: int = 1,
) -> Observer | None:
    """Observe it, see :func:`ds_silent.attach_ddp`. Every rank calls it."""
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
            facts=lambda: {
                "the number of micro-batches": accumulation,
                **parameter_facts(wrapped.module),
                **wrapped.facts(),
            },
            refuse=partial(refuse_unsupported, wrapped),
            framework=lambda own: wrapped.framework(optimizers, own, _most(rows, wrapped), accumulation),
            training=lambda: Training(
                wrapped.words.framework,
                wrapped.module,
                optimizers[0],
                config=wrapped.config,
                sharded=lambda tensor: wrapped.sharded or wrapped.others(tensor),
                groups=partial(groups_of, optimizers),
            ),
            loader=loader,
        )
        return observe(subject, block, refusal)


def _most(rows: int, wrapped: Wrapped) -> int:
    """Return the largest number of the ranks: one may have another loader than the others, or none. A collective."""
    return largest(rows, own_group(wrapped.group()), next(wrapped.module.parameters()).device)


def idle_or_refused(training: Any, config: Given, sentence: str, plain: bool = True) -> Observer | None:
    """Return an observer that does nothing for a plain module that one process trains; else refuse with the sentence.

    Args:
        plain: no framework but ``FullyShardedDataParallel``, which is looked for here, can have wrapped it.

    Raises:
        ConfigError: of that sentence; one process prints it.
    """
    first = training[0] if isinstance(training, (list, tuple)) and training else training
    if plain and isinstance(first, nn.Module) and not is_fsdp1(first) and start.alone():
        return idle_observer(config)
    print_without_traceback(ConfigError, tells=lambda _: is_first())
    raise ConfigError(sentence)


def is_fsdp1(module: Any) -> bool:
    """Tell whether it is a ``FullyShardedDataParallel``, without importing that."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ()))


def torch_optimizer(optimizer: Any) -> Any:
    """Return what an ``AcceleratedOptimizer`` holds, a torch optimizer in name only; else the optimizer itself."""
    accelerated = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", ())
    return optimizer.optimizer if isinstance(optimizer, accelerated) else optimizer


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


def warn_of_another(optimizer: Any, step: int) -> None:
    """Log that an optimizer which the observer was not given steps the model from ``step`` on; on one rank."""
    said = "ds_silent: %s, made behind the observer, steps this model: its steps are observed from step %d on; only of"
    said += " optimizers that the observer was given is it checked what their class and their schedule promise"
    if is_first():
        logging.getLogger("ds_silent").warning(said, shown(type(optimizer).__name__), step)


def follow_accelerate(patches: Patches, moments: Moments) -> None:
    """Follow losses that accelerate divides; by 1 where a script or a Trainer accumulates itself (1.0 to 1.15)."""

    def handed(accelerator: Any, loss: Any) -> None:
        steps = int(accelerator.gradient_accumulation_steps)
        moments.on_loss_handed(loss, Promise("accelerator.backward", steps) if steps > 1 else None)

    def backward(original: Callable[..., Any], accelerator: Any, loss: Any, **kwargs: Any) -> Any:
        moments.guard.local(handed, accelerator, loss)
        return original(accelerator, loss, **kwargs)

    if hasattr(sys.modules.get("accelerate"), "Accelerator"):
        patches.wrap_method(sys.modules["accelerate"].Accelerator, "backward", backward)


@contextmanager
def needing_gradient(parameter: Any) -> Iterator[None]:
    """Let a parameter need a gradient meanwhile, as torch wants for hooks."""
    needed = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(needed)


def parameters_of_optimizer(optimizer: Any) -> set[int]:
    """Return the ids of what it steps."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def contains(module: nn.Module, other: nn.Module) -> bool:
    """Tell whether a module is another, or around it."""
    return any(inner is other for inner in module.modules())


def parameter_facts(module: nn.Module, numel_of: Callable[[Tensor], int] = Tensor.numel) -> dict[str, Any]:
    """Return what all ranks must have alike, by the names that a person would look for; JSON values."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    listed = hashlib.sha256(repr([(name, numel_of(p)) for name, p in named]).encode()).hexdigest()[:8]
    return {
        "the dtypes of the trainable parameters": sorted({str(p.dtype) for _, p in named}),
        start.LIST_OF_TRAINABLE: f"{len(named)} [{listed}]",
    }


# ----------------------------------------------------------------------------------------------------------------------
# What one rank answers for where every rank holds the whole aggregated gradient: an N-th of it, so that the ranks'
# shares make up the whole, once.
#
# A share begins and ends between two rows, so that each piece is a view of the gradient, however that lies in memory
# (``channels_last``, transposed, expanded). A copy would have another address at each look, which says that a script
# has written to the gradient.


@dataclass(frozen=True)
class Slice:
    """A run of one parameter's elements that this rank answers for."""

    index: int  # of the parameter
    start: int
    numel: int


def row_of(parameter: Tensor) -> int:
    """Count the elements behind one index of the first dimension that has several."""
    return parameter.numel() // _first_long(parameter)[1]


def _first_long(values: Tensor) -> tuple[int, int]:
    """Return (dimension, its size), (0, 1) without one."""
    return next(((dim, size) for dim, size in enumerate(values.shape) if size > 1), (0, 1))


def nth_share(numels: Sequence[int], rank: int, ranks: int, rows: Sequence[int] = ()) -> list[Slice]:
    """Cut all parameters, one after the other: about elements ``rank * D / ranks`` to ``(rank + 1) * D / ranks``.

    Two neighbours share a parameter, if it has several rows: a script that scales some parameters, such as those of
    one of two optimizers, never scales just one rank's share.

    Args:
        numels: elements of each parameter.
        rank, ranks: whose share, and of how many.
        rows: elements of a row of each, which is never divided; by default one.
    """
    offsets, total = offsets_of(list(numels))
    bounds = rank * total // ranks, (rank + 1) * total // ranks
    slices = []
    for index, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        row = max(rows[index], 1) if rows else 1
        low, high = (_inside(bound - offset, numel, row) if bound > 0 else 0 for bound in bounds)
        if low < high:
            slices.append(Slice(index, low, high - low))
    return slices


def _inside(place: int, numel: int, row: int) -> int:
    """Return where to cut a parameter, between two of its rows where it has several."""
    if not 0 <= place < numel:
        return min(max(place, 0), numel)
    return max(place // row, numel > row) * row


def cut(values: Tensor | None, piece: Slice) -> Tensor | None:
    """Return a piece's elements, a view where it is whole rows or the values are contiguous; None stays None."""
    if values is None:
        return None
    if values.is_contiguous() and not values.requires_grad:  # one view, because this is done for each at every step
        return values.as_strided((piece.numel,), (1,), values.storage_offset() + piece.start)
    values = values.detach()
    dim, size = _first_long(values)
    if not values.is_contiguous() and piece.start % (row := values.numel() // size) == 0 and piece.numel % row == 0:
        return values.narrow(dim, piece.start // row, piece.numel // row)
    return values.reshape(-1)[piece.start : piece.start + piece.numel]


class AppliedGradients:
    """Which pieces each optimizer applies.

    What no optimizer holds goes with the first, as if it applied its gradient as it is: another optimizer, which the
    observer was not given, may hold it, and if nobody does, that is a finding of its own.
    """

    def __init__(self, pieces: Sequence[tuple[Tensor, Slice]], optimizers: Sequence[Any]):
        """``pieces``: with the parameters that they are of."""
        self._pieces, self._optimizers = pieces, optimizers
        self._groups: tuple[tuple[int, int], ...] = ()
        self._of: dict[int, list[tuple[Tensor, Slice]]] = {}

    def by(self, optimizer: Any) -> Iterable[tuple[Tensor, Slice]]:
        """Return the pieces that it applies; found once for as long as the groups stay."""
        held = [group["params"] for one in self._optimizers for group in one.param_groups]
        groups = tuple((id(parameters), len(parameters)) for parameters in held)
        if groups != self._groups:
            self._groups, self._of = groups, {id(one): [] for one in self._optimizers}
            owner = {id(p): id(one) for one in self._optimizers for group in one.param_groups for p in group["params"]}
            for parameter, piece in self._pieces:
                self._of[owner.get(id(parameter), id(self._optimizers[0]))].append((parameter, piece))
        return self._of.get(id(optimizer), ())


# ----------------------------------------------------------------------------------------------------------------------
# What every rank of a plain data-parallel training holds whole, from the module and its optimizers alone.


def parameters_of(module: nn.Module) -> Items:
    """Return every parameter, trainable or not."""
    return list(module.named_parameters())


def rest_of(module: nn.Module, optimizers: Sequence[Any]) -> Items:
    """Return buffers, masters and the optimizers' own state."""
    return [*buffers_of(module), *masters_of(module, optimizers), *states_of(module, optimizers)]


def buffers_of(module: nn.Module) -> Items:
    """Return buffers without running statistics of a batch, each rank's own unless they are synchronised."""
    own = set(map(id, batch_statistics_of(module)))
    return [(f"{BUFFER}{name}", buffer) for name, buffer in module.named_buffers() if id(buffer) not in own]


def masters_of(module: nn.Module, optimizers: Sequence[Any]) -> Items:
    """Return parameters that only the optimizers have, where these lack some of the module's: fp32 masters.

    Where they lack none, the others are no copies: another module's, or embeddings that are dealt to the ranks. What
    has neither a gradient nor a state is not trained: the module holds another parameter in its place by now.
    """
    own = {id(parameter) for parameter in module.parameters()}
    held = {id(parameter) for parameters in groups_of(optimizers) for parameter in parameters}
    if held.issuperset(id(parameter) for parameter in module.parameters() if parameter.requires_grad):
        return []
    stated = {id(parameter) for optimizer in optimizers for parameter, state in optimizer.state.items() if state}
    return [
        (f"master weights {g}.{p}", parameter)
        for g, parameters in enumerate(groups_of(optimizers))
        for p, parameter in enumerate(parameters)
        if id(parameter) not in own and (parameter.grad is not None or id(parameter) in stated)
    ]


def states_of(module: nn.Module, optimizers: Sequence[Any]) -> Items:
    """Return the optimizers' own tensors, of the module's parameters or their masters."""
    return [
        (f"{STATE}{key} {g}.{p}", value)
        for g, p, state in _states(module, optimizers)
        for key, value in state.items()
        if isinstance(value, Tensor)
    ]


def replica_of(module: nn.Module, optimizers: Sequence[Any], optimizer_state: bool, buffers: bool) -> Replica:
    """Return all that makes one replica; without the optimizers' own state, or buffers, if they are not wanted.

    Some optimizers count their steps in ``param_groups[...]["step"]`` or ``state[...]["step"]`` as plain numbers:
    these travel as a tensor and are written back.
    """
    items = [*parameters_of(module), *(buffers_of(module) if buffers else ()), *masters_of(module, optimizers)]
    if not optimizer_state:
        return Replica(items, lambda: None)
    numbers = _step_numbers(module, optimizers)
    counts = torch.tensor([int(where["step"]) for where in numbers], dtype=torch.int64)

    def write_back() -> None:
        for where, count in zip(numbers, counts.tolist(), strict=True):
            where["step"] = type(where["step"])(count)

    items += states_of(module, optimizers)
    return Replica([*items, ("optimizer step numbers", counts)] if numbers else items, write_back)


def _states(module: nn.Module, optimizers: Sequence[Any]) -> list[tuple[int, int, dict[str, Any]]]:
    own = {id(one) for one in (*module.parameters(), *(master for _, master in masters_of(module, optimizers)))}
    held = [(one.state, parameters) for one in optimizers for parameters in groups_of([one])]
    return [
        (g, p, state.get(one) or {}) for g, (state, of) in enumerate(held) for p, one in enumerate(of) if id(one) in own
    ]


def _step_numbers(module: nn.Module, optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what holds a step number: parameter groups and states."""
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    places = [*groups, *(state for _, _, state in _states(module, optimizers))]
    return [where for where in places if isinstance(where.get("step"), (int, float))]
