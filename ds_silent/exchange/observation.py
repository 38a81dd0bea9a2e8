"""What one rank knows of a step, and what all ranks know of it once it was exchanged. Numbers, and no behaviour.

    observation = Observation(status=Status(step=7.0), local=Local(seen=1.0, squared=norm_squared), sketch=sketch)
    gathered.status.failed                       # (N,): the same groups, of all ranks

The groups hold a ``float`` or a 0-dim tensor on the training's device for one rank, and a (N,) float64 tensor on the
host for all. What a rank does not know is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", float | Tensor, Tensor)
_0: Any = 0.0

BROKE, LEFT, ASTRAY, UNSEEN, UNEVEN, WITHIN = 1.0, 2.0, 3.0, 4.0, 5.0, 6.0
"""Values of ``failed``: an internal error; the observer was closed there; gradients were reduced and no step taken; a
gradient that cannot be observed; ranks may take different numbers of steps; optimizers step within the backward. See
:mod:`ds_silent.observing.lockstep`."""
LEFT_OUT, PARTLY = -2.0, 2.0
"""In :class:`Applied`: the script has cleared the reduced gradient, and no optimizer was to apply it."""
BEHIND = 2.0
"""Of ``hooked``."""
MORE_CAME = 2.0
"""Of :class:`Local`'s ``seen``: a backward that was not reduced came behind the one that was."""
PARAMETERS = 2.0
"""Of ``replica_seen``: the parameters' checksum, without what else is replicated."""


@dataclass(frozen=True)
class Status(Generic[T]):
    """Where a rank is."""

    failed: T = _0  # not 0 when this rank's observer broke or ended: everybody switches off
    nothing: T = _0  # 1 in an observation that only says where this rank is
    step: T = _0  # by this rank's framework
    boundary: T = _0  # reductions that this rank has passed


@dataclass(frozen=True)
class Wishes(Generic[T]):
    """What a rank wants all ranks to do; 1 each."""

    stop: T = _0  # the writing rank: end the training
    diagnose: T = _0  # the writing rank: exchange the micro-batches' own sketches
    compare: T = _0  # any rank: compare the replicas after the next step


@dataclass(frozen=True)
class Loss(Generic[T]):
    """Of the micro-batches of the step."""

    total: T = _0
    count: T = _0
    scale: T = _0  # factor on all gradients of the step
    tokens: T = _0  # label tokens; 0 when not known
    inputs: T = _0  # root mean square of inputs that are no ids; 0 when not known
    order: T = _0  # hash of the order that the sampler deals; negative where that keeps to its rows; 0: not known
    data: T = _0  # hash of the data set, where each pass of this rank takes all of it; negative: dealt; 0: not known
    first_rows: T = _0  # and of the first rows that the pass under way has taken


@dataclass(frozen=True)
class Local(Generic[T]):
    """The local accumulated gradient."""

    seen: T = _0  # 1 when it was captured whole; or MORE_CAME
    norm_seen: T = _0  # 1 when ``squared`` is the exact one; else norms come from the sketch, on all ranks
    gram_seen: T = _0  # 1 when the exact inner products were exchanged at this step
    squared: T = _0  # squared norm of the gradient
    leftover_squared: T = _0  # of what an earlier step left in the gradients
    micro_squared: T = _0  # sum over micro-batches of squared norms, where each is reduced on its own
    fired: T = _0  # trainable parameters that got a gradient
    missed_places: T = _0  # sum of place_of for those that got none
    zeros: T = _0  # parameters whose gradient is exactly zero, or that got none; -1 when not known
    zero_places: T = _0  # sum of place_of for those
    sketch_squared: T = _0  # of the sketch; only where not everybody gets everybody's
    late_cosine: T = _0  # with the rest, of the observation before; likewise
    hooked: T = _0  # 1 when a hook of the script has changed it; BEHIND when one has behind the observer's hook
    hooked_before: T = _0  # squared norm of the gradients that the script's hooks change, before them
    hooked_behind: T = _0  # and behind them


@dataclass(frozen=True)
class Reduced(Generic[T]):
    """The part of the aggregate that a rank answers for, and its replica."""

    seen: T = _0
    squared: T = _0
    handed_seen: T = _0  # 1 when it was changed before the step and looked at again; -1 when it was changed unseen
    handed_squared: T = _0  # as the step began, where it was looked at again
    handed_factor: T = _0  # and how many times the aggregate it was then
    handed_error: T = _0  # squared length of what no factor explains
    replica_seen: T = _0  # 1 when the first hash is that of the replica; PARAMETERS when it is that of these alone
    counted: T = _0  # squared, as the step began: of what counts in the whole model's norm, where others hold the rest


@dataclass(frozen=True)
class Applied(Generic[T]):
    """What the optimizer used of that part in the step before."""

    seen: T = _0  # 1 when it applied all; -1 nothing; LEFT_OUT when the script wanted that; PARTLY some
    factor: T = _0  # applied over aggregated
    error: T = _0  # squared length of what no factor explains
    squared: T = _0


@dataclass(frozen=True)
class Code(Generic[T]):
    """Short hashes of what :mod:`ds_silent.capture.settings_check` compares; 0 when not known."""

    hyper_parameters: T = _0
    device_hyper_parameters: T = _0
    training_modes: T = _0
    trainable: T = _0
    first_draws: T = _0  # of the random numbers that the first training forward drew; 0 when it drew none
    settings: T = _0  # of modules
    autocast: T = _0
    counters: T = _0  # 1 + the largest step counter of the optimizers
    objective: T = _0  # operations between the loss and what backward begins with
    loss_inputs: T = _0  # the script's own numbers in what the losses are made of, such as a temperature
    label_places: T = _0  # where labels come from, see :mod:`ds_silent.capture.label_places`
    picked: T = _0  # rows of the data set that a sampler deals to the ranks
    hooks: T = _0  # the script's own on gradients, where one has changed a gradient here
    breaches: T = _0  # what this rank's rules have found; 0 is nothing


@dataclass(frozen=True)
class Objective(Generic[T]):
    """How much this rank's labels count in the step's loss, see :mod:`ds_silent.capture.objective`; not unscaled."""

    known: T = _0  # 1 when the weight of every label is
    labels: T = _0
    weight: T = _0  # of all labels together
    smallest: T = _0  # of one label
    largest: T = _0
    factor: T = _0  # product of the script's own numbers between loss and root; 0 when not known
    reduction: T = _0  # 1 mean, 2 sum, 3 a sum of weights of each label's own
    count: T = _0  # backwards
    others: T = _0  # short hash of the loss's other terms
    class_weights: T = _0  # one number of them


@dataclass(frozen=True)
class Observation:
    """One rank's observation of one step. Tensors are fp32 on the training device; nothing here was waited for."""

    status: Status[float | Tensor] = Status()
    wishes: Wishes[float | Tensor] = Wishes()
    loss: Loss[float | Tensor] = Loss()
    local: Local[float | Tensor] = Local()
    reduced: Reduced[float | Tensor] = Reduced()
    applied: Applied[float | Tensor] = Applied()
    code: Code[float | Tensor] = Code()
    objective: Objective[float | Tensor] = Objective()
    sketch: Tensor | None = None  # (k,) of the local accumulated gradient
    aggregate: Tensor | None = None  # (k,) of the owned part of the aggregated gradient
    layer_squares: Tensor | None = None  # (G,)
    ids: Tensor | None = None  # packed ids of the rows since the last observation
    layer_sketches: Tensor | None = None  # (L, k); sent folded to layer_size
    gram: Tensor | None = None  # (N, N) this rank's part of the exact inner products
    layer_aggregates: Tensor | None = None  # (L, k) of the owned part of the aggregate; sent folded
    hashes: Tensor | None = None  # int64 (H,) bit hashes, see ds_silent.kernels.checksums
    rows: Tensor | None = None  # the hash of the step's rows, see ds_silent.exchange.row_ids
    weights: Tensor | None = None  # this rank's part of the sampled weights, see ds_silent.capture.traced


@dataclass(frozen=True)
class EachRank:
    """Up to the gather limit everybody gets everybody's sketches."""

    sketches: Tensor  # (N, k)
    layer_sketches: Tensor | None  # (N, L, layer_size)
    layer_aggregate: Tensor | None  # (L, layer_size) sketch of the aggregated gradient


@dataclass(frozen=True)
class Sums:
    """Above it, sums over the ranks."""

    units: Tensor  # (layout.units,) of the sketches divided by their lengths, folded
    mean: Tensor  # (k,)
    layers: Tensor | None  # (L, layer_size) mean of the ranks'
    layer_aggregate: Tensor | None  # (L, layer_size)
    probes: Tensor  # (N, layout.probes) of each rank's direction
    pairs: Tensor | None = None  # (N, layout.pairs) folded sketches
    of_before: Tensor | None = None  # (N, layout.late) what the ranks found late, of the observation before
    late: Late | None = None  # None until the next observation has brought them


@dataclass(frozen=True)
class Late:
    """What a rank finds once it has the sums of a step: (N,)."""

    cosines_with_rest: Tensor
    weights: Weights | None
    layer_cosines: Tensor | None  # (N, L) with the rest


@dataclass(frozen=True)
class Weights:
    """With which each rank's gradient entered the aggregate: (N,). No weights of the model."""

    found: Tensor  # 1 is right
    own_squared: Tensor  # squared length of the part of its sketch by which that is known


@dataclass(frozen=True)
class Gathered:
    """All ranks' observations of one step, float64 on the host."""

    step: int
    status: Status[Tensor]
    wishes: Wishes[Tensor]
    loss: Loss[Tensor]
    local: Local[Tensor]
    reduced: Reduced[Tensor]
    applied: Applied[Tensor]
    code: Code[Tensor]
    objective: Objective[Tensor]
    layer_squares: Tensor  # (N, G)
    ids: Tensor  # (N, layout.ids)
    aggregate: Tensor = field(default_factory=lambda: torch.empty(0))  # (k,) sketch of the aggregated gradient
    gram: Tensor | None = None  # (N, N) exact inner products, summed over pieces
    directions: EachRank | Sums | None = None  # None where nothing is sketched
    hashes: Tensor | None = None  # int64 (N, layout.hashes)
    rows: Tensor | None = None  # (N, layout.rows)
    weights: Tensor | None = None  # (layout.weights,) summed over the ranks

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.status.failed)

    @property
    def leftover(self) -> tuple[int, ...]:
        """Ranks in whose gradients an earlier step left something."""
        return tuple(self.local.leftover_squared.nonzero().flatten().tolist())

    @property
    def norms_exact(self) -> bool:
        """Whether the squared norms are those of the step: with something left over only the sketches are."""
        return on_all(self.local.norm_seen) and not self.leftover

    @property
    def layer_aggregate(self) -> Tensor | None:
        """(L, layer_size) sketch of the aggregated gradient by layer."""
        return None if self.directions is None else self.directions.layer_aggregate

    @property
    def each(self) -> EachRank | None:
        """What there is of each rank's direction."""
        return self.directions if isinstance(self.directions, EachRank) else None

    @property
    def sums(self) -> Sums | None:
        """What there is of all ranks' directions together, where they stay with the ranks."""
        return self.directions if isinstance(self.directions, Sums) else None


_KINDS: tuple[Any, ...] = (Status, Wishes, Loss, Local, Reduced, Applied, Code, Objective)
GROUPS: dict[str, Any] = {kind.__name__.lower(): kind for kind in _KINDS}
FIELDS = tuple(f"{name}.{one.name}" for name, group in GROUPS.items() for one in fields(group))
"""In the order in which they travel."""


def on_all(flags: Tensor) -> bool:
    """Whether every rank says so."""
    return bool((flags.numpy() > 0).all())


def on_any(flags: Tensor) -> bool:
    """Whether some rank says so."""
    return bool((flags.numpy() > 0).any())


def replica_checksums(gathered: Gathered) -> Tensor | None:
    """Return each rank's checksum, (N,), of the same: the whole replica, or its parameters. None if one is missing."""
    sent = gathered.reduced.replica_seen
    if gathered.hashes is None or not on_all(sent) or bool((sent != sent[0]).any()):
        return None
    return gathered.hashes[:, 0]
