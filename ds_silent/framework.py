"""The base class of every adapter, and the moments at which it calls: all that an observer knows of a framework.

    framework = DDPFramework(ddp, optimizers, config, micro_batch_rows=4, accumulation=1)     # a Framework
    capture = StepCapture(framework, config)            # the same for every framework: ds_silent.capture.step
    framework.connect(moments)                          # hooks, each of which calls a moment

An adapter is one class that derives from :class:`Framework`, says what is not as the defaults say, and puts its hooks
in place in :meth:`Framework.connect`. A loop that a script writes itself has most of that in
:mod:`ds_silent.frameworks.torch_loop`. Whatever a step remembers is in :mod:`ds_silent.capture.step`, once for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.config import BLOCK, ConfigError
from ds_silent.distributed.communicator import own_group
from ds_silent.distributed.guard import CollectiveGuard
from ds_silent.exchange.whole_model import WholeModel
from ds_silent.kernels.checksums import Items, Replica
from ds_silent.maths.rounding_bound import Arithmetic, coarsest
from ds_silent.patches import Patches
from ds_silent.patches.script_hooks import ScriptHooks
from ds_silent.records import Event
from ds_silent.replicas.duplicates import Duplicates, compared
from ds_silent.text import TORCH, Words, shown

Part = tuple[int, int, Tensor]
"""(parameter, first element, values): a piece of a gradient."""


@dataclass(frozen=True)
class Moments:
    """What an adapter calls. Each is guarded already (:mod:`ds_silent.distributed.guard`).

    Every adapter calls ``pre_forward``, ``on_gradient``, ``post_backward``, ``pre_update`` and ``post_step``. The
    others are for what a framework has; what is left out, the records lack.
    """

    guard: CollectiveGuard  # for what an adapter's own hooks do on the way to a moment
    pre_step: Callable[..., object]  # (held, apart=False) before a step's gradients: held() is what they hold already
    pre_forward: Callable[..., object]  # (module, args, kwargs): a micro-batch's rows
    post_forward: Callable[..., object]  # (module, args, output): a loss, where nothing else gives one
    on_loss: Callable[..., object]  # (loss) of a micro-batch, unscaled, as its backward begins
    on_loss_share: Callable[..., object]  # (loss) one that was divided: the shares of a step add up to its loss
    on_loss_handed: Callable[..., object]  # (loss, promise, below) to a wrapper, which makes a root of it
    pre_backward: Callable[..., object]  # (root, own=False) what a backward begins with; own: it reaches the model
    on_loss_scaled: Callable[..., object]  # (factor, gradient) of the loss: their product is the gradients' scale
    on_gradient: Callable[..., bool | None]  # (parameter, gradient) of a micro-batch; whether on_accumulated is to come
    on_gradients_left: Callable[..., object]  # (parameters, boundary) all whose gradients came behind such a one
    is_measured: Callable[[], bool]  # (): the step under way is; else a backward's first gradient is all that it needs
    on_accumulated: Callable[..., object]  # (*anything) what hooks have seen has been, and is not reduced yet
    post_backward: Callable[..., bool | None]  # (*anything) a backward has ended; whether exact products are due
    post_reduction: Callable[..., object]  # (again=False): the aggregate is there, and the script has not seen it yet
    pre_update: Callable[..., object]  # (*anything): once per step, between the reduction and the first optimizer
    pre_optimizer_step: Callable[..., object]  # (optimizer, args, kwargs) each time one begins to apply the aggregate
    on_aggregate_written: Callable[[], object]  # (): a loss scaler has written to it, which torch does not count
    on_gradient_dropped: Callable[[], object]  # (): what has come since the last step was cleared and belongs to none
    post_step: Callable[[], object]  # (): the optimizers have run, the counters have advanced
    pre_checkpoint: Callable[..., object]  # (*anything)
    close: Callable[..., object]  # (*anything): the training is over


@dataclass(frozen=True)
class Promise:
    """Who promises that a step's gradient is the mean of its losses, over the micro-batches and the ranks.

    Attributes:
        by: the function, for messages.
        micro_batches: the number that it divides by, whatever came; 0: by as many as came.
        as_given: it promises no mean, but that the gradient is that of the loss it was given.
    """

    by: str
    micro_batches: int = 0
    as_given: bool = False


@dataclass
class StepCounts:
    """Count steps and rows where nothing of the framework does."""

    data_ranks: int = 1  # that consume rows of their own
    taken: int = 0  # steps
    rows: int = 0  # consumed by all ranks until the last step
    last_rows: int = 0  # of this rank, in the step that was taken last
    skipped: bool = False  # the optimizer left that step out, for infinities
    left_out: bool = False  # the script did, by clearing its gradient, or is about to: on all ranks alike no fault
    partly: bool = False  # some of its optimizers stepped, others did not
    scaled: bool | None = None  # a GradScaler has multiplied the loss of its newest backward; None: nobody looks
    unreduced: bool = False  # micro-batches of the step under way have come, and nothing has reduced them
    cleared: int = 0  # times that the script cleared gradients of the step under way, which nothing had reduced yet
    rows_of_step: Callable[[], tuple[int, int]] = lambda: (0, 0)  # of this rank: of the data, and of its forwards

    @property
    def step(self) -> int:
        """The optimizer step under way, from 1."""
        return self.taken + 1

    @property
    def samples(self) -> int:
        """Rows consumed by all ranks so far."""
        return self.rows

    @property
    def batch(self) -> float:
        """Rows per rank and optimizer step, now."""
        return float(self.last_rows)

    @property
    def update_skipped(self) -> bool:
        """Whether the optimizer did not apply the step just taken, whatever the reason."""
        return self.skipped or self.left_out

    def take(self, skipped: bool, left_out: bool = False, partly: bool = False) -> None:
        """Count the step that ends, taken or left out, and its rows on each rank."""
        self.take_rows()
        self.taken += 1
        self.skipped, self.left_out, self.partly, self.cleared = skipped, left_out, partly, 0

    def take_rows(self) -> None:
        """Count the rows of the step under way."""
        of_data, rows = self.rows_of_step()
        self.rows += of_data * self.data_ranks
        self.last_rows = rows or self.last_rows  # a further backward of the same forward has the same rows

    def state_dict(self) -> dict[str, int]:
        """Return what goes with the observer's state: JSON values; nothing where the framework keeps it."""
        return {"step": self.step, "samples": self.rows}

    def load_state_dict(self, state: Any) -> None:
        """Continue from :meth:`state_dict`; ``rows`` are of each rank, where nobody knows those of all.

        Raises:
            ValueError: it is damaged; where the step is not, that is taken.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"what it has counted must be an object, and is {shown(state)}")
        self.taken = whole_number(state, "step", 1, " of what it has counted") - 1
        key, ranks = ("samples", 1) if "samples" in state else ("rows", self.data_ranks)
        self.rows = whole_number(state, key, 0, " of what it has counted") * ranks


def whole_number(state: Mapping[str, Any], key: str, least: int, place: str = "") -> int:
    """Return a number of a saved state, or raise a ValueError that says what it must be."""
    value = state.get(key)
    if type(value) is not int or value < least:
        raise ValueError(f'"{key}"{place} must be an integer of at least {least}, and is {shown(value)}')
    return value


Origin = Literal["yours", "default", "framework"]


class Setting(NamedTuple):
    """A value that a training runs with, and where it comes from; one that the framework computed is its own."""

    value: Any
    origin: Origin


@dataclass
class Peers:
    """Ranks of other groups, which hold the rest of the model, or the same once more."""

    duplicates: Sequence[Duplicates] = ()
    model: WholeModel | None = None  # on a group's first rank, where one group does not know all
    in_norm: frozenset[int] | None = None  # parameters that count in the whole model's norm, where a step clips by it

    def compare(self, step: int) -> Iterable[Event]:
        """Compare ranks of several groups as a step begins; on every rank, and none waits."""
        return compared(self.duplicates, step)


@dataclass(frozen=True)
class WeightCopy:
    """Hold low-precision weights, and the fp32 masters that they are rounded from: flat, of the same elements."""

    name: str
    weights: Tensor
    masters: Tensor


@dataclass(frozen=True)
class GatheredPiece:
    """Name a parameter that is whole in a module's forward alone, and what this rank itself has put into it.

    Attributes:
        module: whose forward pre-hooks, made before those of an observer, gather it.
        own: returns the elements of the whole that come from this rank, and its shard: flat, of the same elements. None
            where the one or the other is not there.
        travels: returns the dtype in which shards may be gathered, where that is neither's.
    """

    name: str
    module: nn.Module
    own: Callable[[], tuple[Tensor, Tensor] | None]
    travels: Callable[[], torch.dtype | None] = lambda: None


class Framework:
    """One training of one framework. Every rank asks the same at the same steps. Making one is a collective."""

    words: Words = TORCH  # what its users know things by
    ranks_comparable = True  # each does the same work on rows of its own: a rank unlike the others is odd
    micro_batches = 1  # per step
    micro_batches_told = True  # by an engine or the script; else that is a guess
    micro_batches_at_once = 1  # of the script's, where one of these is several
    micro_batch_rows = 64  # as configured, on each rank
    max_reductions_per_step = 1  # micro-batches that may be a boundary, where a script reduces each
    reduces_every_micro_batch = False  # and frees it: nothing accumulates the local gradient
    overlaps_backward = False  # the reduction begins while the boundary's backward runs
    reads_together = False  # what hooks have seen is read at :attr:`Moments.on_accumulated`, all of it at once
    hook_sees_full_gradient = True  # at the boundary: what is accumulated and what a hook gets make the local gradient
    aggregate_replicated = False  # every rank holds the whole aggregated gradient where it accumulates
    observes_applied = False  # :meth:`applied` can tell
    promise: Promise | None = None  # of a trainer around it; a wrapper of the backward has its own
    forwards_alone = False  # no other rank takes part in a forward of the module
    clip = 0.0  # largest norm of the applied gradient; 0 is none
    peers: Peers | None = None  # where several data-parallel groups share the model
    came_with: Sequence[float | None] | None = None  # the groups' rates, where a scheduler rises to them
    wrapper: object = None  # the DistributedDataParallel that is this training's
    weights_sharded = False  # :meth:`weights` yields a part on each rank
    own_rules: Sequence[Any] = ()  # of this framework alone, see ds_silent.rules.rule
    averages_weights = False  # the script does so now and then, and not the gradients: replicas part between

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[tuple[str, Tensor]],
        group: dist.ProcessGroup,
        optimizers: Sequence[Any] = (),
        device: torch.device | None = None,
    ):
        """Make a communicator of our own, so that nothing of the training's pairs with it: a collective.

        Args:
            module: one forward of it is a micro-batch.
            parameters: the trainable ones whose gradients are reduced, by name, in an order that all ranks share.
            group: of the ranks whose gradients make one aggregate.
            optimizers: the ``torch.optim`` optimizers at the bottom.
            device: of what the ranks exchange; by default the parameters' own.
        """
        for name, parameter in parameters:
            if parameter.is_complex():
                raise ConfigError(
                    f"{BLOCK} cannot observe {name}, whose numbers are complex ({str(parameter.dtype)[6:]}); keep it "
                    f'as torch.view_as_real, freeze it, or set "{BLOCK}": {{"enabled": false}}'
                )
        self.group, self.module = own_group(group), module  # the observer's own communicator, not the training's
        self.names, self.parameters = [name for name, _ in parameters], [p for _, p in parameters]
        self.numels = [parameter.numel() for parameter in self.parameters]  # elements of each, whole
        self.shapes = [tuple(parameter.shape) for parameter in self.parameters]  # likewise
        self.device = device or (self.parameters[0].device if self.parameters else torch.device("cpu"))
        self.counts, self.patches = StepCounts(dist.get_world_size(self.group)), Patches()
        self.script_hooks = ScriptHooks()
        self._optimizers = list(optimizers)

    # -- what every adapter says -----------------------------------------------------------------------------------

    def connect(self, moments: Moments) -> None:
        """Register every hook, in ``self.patches``."""
        raise NotImplementedError

    def aggregated(self) -> Iterator[Part] | None:
        """Yield this rank's share of the aggregated gradient: the ranks' shares make up the whole. None: hidden."""
        return None

    # -- what has a default ----------------------------------------------------------------------------------------

    def close(self, ended: bool) -> None:
        """Remove every hook; ``ended``: for good, and not because an observer broke."""
        self.patches.undo()

    @property
    def step(self) -> int:
        """The optimizer step under way, from 1."""
        return self.counts.step

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        """Return that of the reduction of ``elements`` numbers, seen through sketches of ``width``.

        By default each gradient is multiplied by 1/N and added up in the parameters' own dtype.
        """
        own = coarsest(parameter.dtype for parameter in self.parameters)
        return Arithmetic(
            own, before=2, accumulation=own, applied=own, norm=own, elements=elements, width=width, handed_unscaled=True
        )

    def is_boundary(self) -> bool:
        """Tell whether the micro-batch under way is the step's last."""
        return True

    def is_changed_behind(self, index: int) -> bool:
        """Tell whether another hook may change a parameter's gradient behind this observer's, before it accumulates."""
        return self.script_hooks.is_behind(index)

    def accumulated(self, index: int) -> Tensor | None:
        """Return what this rank has accumulated of a parameter's gradient, until the reduction."""
        return None

    def reduced(self, index: int) -> Tensor | None:
        """Return the aggregate of one parameter, from the reduction until the optimizer, where every rank holds it."""
        return None

    def applied(self, optimizer: Any) -> Iterator[Part]:
        """Yield what an optimizer is about to apply, of this rank's share."""
        return iter(())

    def seeks_loss_scale(self, applied: bool | None) -> bool:
        """Tell whether the step just taken was left out in search of the loss scale.

        Args:
            applied: whether ``pre_optimizer_step`` came; None: not observed.
        """
        return self.counts.skipped

    def scale(self, seen: Tensor | None) -> float | Tensor:
        """Return the factor on every gradient of this step; ``seen``: what the loss's own gradient said."""
        return 1.0 if seen is None else seen

    def gram(self) -> Tensor | None:
        """Return this rank's part of the exact inner products, where the framework's reduction has made them."""
        return None

    def optimizers(self) -> list[Any]:
        """Return the ``torch.optim`` optimizers at the bottom."""
        return self._optimizers

    def settings(self) -> dict[str, Setting]:
        """Return what the framework itself runs with, by name; see :mod:`ds_silent.rules.settings_in_force`."""
        return {}

    def schedulers(self) -> list[Any]:
        """Return the schedulers of the learning rates; none where the framework does not know them."""
        return []

    def parameter_groups(self) -> list[list[Tensor]] | None:
        """Return the model's own parameters by the groups of the optimizers: the same lists until they change."""
        return None

    def reduced_ids(self) -> Set[int] | None:
        """Return ``id`` of each parameter whose gradient is reduced; None: of all that have one, or not known."""
        return None

    def copies(self) -> list[WeightCopy]:
        """Return the low-precision weights that this rank rounds from masters, as they are between two updates."""
        return []

    def gathered(self) -> list[GatheredPiece]:
        """Return the parameters that a forward gathers from the ranks' shards; the same list until the end."""
        return []

    def weights(self) -> Iterator[Part]:
        """Yield the weights in use, before the update: whole on every rank, or of each element one rank's piece.

        A whole tensor may have its own shape, a piece is flat.
        """
        return ((index, 0, parameter.detach()) for index, parameter in enumerate(self.parameters))

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        """Return parameters that every rank holds whole, and a function that names all else that is replicated."""
        return [], list

    # -- what only some responses ask for: they are refused with the other frameworks ----------------------------------

    def replica(self, optimizer_state: bool, buffers: bool) -> Replica:
        """Return what may be written between two steps: one replica, with what the optimizer keeps beside fp32 masters,
        and the buffers that a forward may change."""
        raise NotImplementedError

    def keep_for_again(self, *args: Any, **kwargs: Any) -> None:
        """Keep the local gradient, at the boundary, with what ``post_backward`` was called with."""
        raise NotImplementedError

    def reduce_again(self) -> int:
        """Reduce again what was kept; return the bytes of the gradients. A collective."""
        raise NotImplementedError

    def save_checkpoint(self, directory: str, tag: str, client_state: dict[str, Any]) -> None:
        """Write the framework's own checkpoint to a place that is named. A collective."""
        raise NotImplementedError


def layers_of(names: list[str]) -> tuple[tuple[str, ...], list[int]]:
    """Group parameters by layer: the path up to the first number (``model.layers.3``), else the module's own name."""
    order: dict[str, int] = {}
    groups = []
    for name in names:
        match = re.match(r"(.*?\.\d+)\.", name)
        layer = match.group(1) if match else name.rpartition(".")[0] or name
        groups.append(order.setdefault(layer, len(order)))
    return tuple(order), groups
