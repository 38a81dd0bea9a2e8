"""What the drill injects: faults of data, seeds, weights, hyper-parameters, gradients, their reduction and replicas.

Those at the end are answered: the training has a response switched on, and must come out repaired.

    fault = FAULTS["gradient-scaled-1.5"]
    strike = Strike(rank=2, ranks=4, step=21, size=fault.size)
    injection = fault.inject(strike, me=2)          # what changes on rank 2; nothing changes where nothing is set
    fault.expected_ranks(strike)                    # ((2,),)

A fault says what the observer must answer: the kind of event, the ranks, the cause, and whether chance plays a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ds_silent.drill.faults import inputs as inject
from ds_silent.drill.faults import passing
from ds_silent.drill.faults import reduction as corrupt
from ds_silent.drill.faults.inputs import Injection, Strike
from ds_silent.drill.faults.responses import DYNAMIC, MAJORITY, MEAN, ORDERED_RETRY, PERIODIC, RETRY, Response

Where = Literal[
    "data", "seed", "weights", "hyper-parameter", "environment", "gradient", "loss", "reduction", "update", "replica"
]
Who = Literal[
    "the rank",
    "the odd rank",
    "the rank or all",
    "the pair",
    "the pair or nobody",
    "all ranks",
    "nobody",
    "the receiver",
    "an owner",
]
"""``the odd rank`` is found by comparison, and two ranks cannot outvote each other: then both are named, or none.
``the rank or all``: rows that come again are known without knowing whose fault it is; the sampler's own facts, where
the observer has them, name the rank. ``nobody``: the same on all ranks, so there is nobody to accuse. ``the receiver``
holds the wrong piece; in stage 0 the others hold the right one, under ZeRO nobody else does and nobody can be named.
``the pair or nobody``: two ranks with different damage, where the others may or may not be more than half of all.
``an owner``: where ZeRO gives a piece to one rank, it is that rank's own gradient; in stage 0 each has its own."""

BEFORE = 0
WARM = 21  # the statistical detectors have a history by then
EARLY = 4  # facts and rounding bounds need none


@dataclass(frozen=True)
class Fault:
    """One way in which a data-parallel training goes wrong, and what must be said about it.

    ``kinds``: the event that must come; each is right where a fault has several faces (a NaN loss also has a zero or
    NaN gradient). ``first_step``: 0 is before the training. ``deterministic``: no chance in it, so the event must be
    at the first measured step. ``steps``: how long a training may go on after the first step, in measured steps;
    ``stages``, ``dtypes``, least ``accumulation``: where DeepSpeed survives the fault and it means something.
    ``says``: words of the right cause and place that the event must hold; {rank}, {ranks}, {step} are the strike's.

    ``response``: switched on in this fault's training, which must then be repaired, at one step or at every step
    (``again``), or, where ``repaired`` is False, be left as it is with an error that says so. ``repair_says``: words of
    the ``repaired`` event, or of that error.
    """

    name: str
    kinds: tuple[str, ...]
    who: Who
    strikes: Where
    inject: Callable[[Strike, int], Injection]
    description: str
    deterministic: bool = True
    first_step: int = WARM
    steps: int = 6
    size: float = 1.0
    ids: bool = True  # whether the script tells the row ids
    stages: tuple[int, ...] = (0, 1, 2, 3)
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    accumulation: int = 1
    says: tuple[str, ...] = ()
    response: Response | None = None
    repaired: bool = True
    again: bool = False
    repair_says: tuple[str, ...] = ()

    def possible(self, stage: int, dtype: str, accumulation: int) -> bool:
        """Whether the fault means something in such a training."""
        return stage in self.stages and dtype in self.dtypes and accumulation >= self.accumulation

    def expected_words(self, strike: Strike) -> tuple[str, ...]:
        """What the event must say of cause and place."""
        return tuple(phrase.format(rank=strike.rank, ranks=strike.ranks, step=strike.step) for phrase in self.says)

    @property
    def kind(self) -> str:
        """The event to expect, as a table says it."""
        return self.kinds[0]

    def expected_ranks(self, strike: Strike) -> tuple[tuple[int, ...], ...]:
        """What the event may name; the first is the best answer. Empty: no majority, so nobody is accused."""
        everyone, rank = tuple(range(strike.ranks)), (strike.rank,)
        sharded = strike.stage > 0
        if self.who == "nobody" or (self.who == "the receiver" and sharded):
            return ((),)
        if self.who == "an owner":
            return ((), *((owner,) for owner in everyone if sharded))
        if self.who in ("the pair", "the pair or nobody"):
            pair = tuple(sorted((strike.rank, strike.partner)))
            return (pair,) if self.who == "the pair" else ((), pair)
        if self.who == "all ranks" or (self.who in ("the odd rank", "the receiver") and strike.ranks == 2):
            return (everyone, ())
        return (rank, everyone) if self.who == "the rank or all" else (rank,)

    def mended_ranks(self, strike: Strike) -> tuple[int, ...]:
        """Whom the response's event must name: those that got, or should have got, a majority's bits."""
        if self.response is None or not self.response.names_ranks or self.who == "nobody":
            return ()
        return tuple(sorted((strike.rank, strike.partner))) if self.who == "the pair or nobody" else (strike.rank,)


def _chance(steps: int, fault: Fault) -> Fault:
    """Found by a sequential test, which has to see some steps first."""
    return replace(fault, deterministic=False, steps=steps)


def _before(
    name: str,
    kinds: tuple[str, ...],
    strikes: Where,
    injection: Callable[[Strike, int], Injection],
    description: str,
    size: float = 1.0,
    stages: tuple[int, ...] = (0, 1, 2, 3),
) -> Fault:
    """Found before the training, by comparing the ranks."""
    return Fault(
        name, kinds, "the odd rank", strikes, injection, description, first_step=BEFORE, size=size, stages=stages
    )


_early = partial(Fault, first_step=EARLY)

_ORDER = ("data-order-mismatch", "low-coverage")
_DUPLICATE, _OUTLIER, _CONFIG = ("duplicate-data",), ("outlier-rank",), ("config-mismatch",)
_SEED, _WEIGHTS = ("seed-mismatch",), ("initial-weights-mismatch",)
_AGGREGATION, _UNREDUCED, _DRIFT = ("aggregation-error",), ("unreduced-gradient",), ("replica-drift",)
_REPLICATED = (0, 1, 2)  # under ZeRO-3 each number has one owner: no two ranks could disagree
_REDUCED = (0, 1, 2)  # where the drill reaches into the reduction

# A table reads better than what a formatter makes of it.
# fmt: off
_DATA = (
    Fault("same-batch-everywhere", _DUPLICATE, "all ranks", "data", inject.same_batch,
          "every rank gets the first rank's rows (a sampler that nobody told of the ranks)"),
    Fault("same-batch-everywhere-without-ids", _DUPLICATE, "all ranks", "data", inject.same_batch,
          "the same, and the script does not tell which rows it takes", ids=False),
    Fault("same-batch-pair", _DUPLICATE, "the pair", "data", inject.same_batch_as_neighbour,
          "one rank gets its neighbour's rows"),
    Fault("same-batch-pair-without-ids", _DUPLICATE, "the pair", "data", inject.same_batch_as_neighbour,
          "the same, and the script does not tell which rows it takes", ids=False),
    Fault("same-content-other-ids", _DUPLICATE, "the pair", "data", inject.neighbours_content,
          "one rank computes on its neighbour's rows under ids of its own: only the gradients can tell"),
    _chance(12, Fault("repeated-batch", _ORDER, "the rank", "data", inject.repeated_batch,
          "one rank's loader is stuck: the same rows again and again")),
    _chance(40, Fault("sampler-seed-one-rank", _ORDER, "the rank or all", "data", inject.sampler_seed_one_rank,
          "one rank shuffles with another seed under a sharded sampler", first_step=1)),
    _chance(40, Fault("sampler-seed-every-rank", _ORDER, "all ranks", "data", inject.sampler_seed_every_rank,
          "every rank shuffles with a seed of its own: a third of the rows is never seen", first_step=1)),
    Fault("sampler-world-size-one", _DUPLICATE, "all ranks", "data", inject.sampler_alone,
          "every rank's sampler believes to be alone", first_step=1),
    _chance(40, Fault("sampler-world-size-twice", ("low-coverage", "data-order-mismatch"), "all ranks", "data",
          inject.sampler_twice, "the sampler counts twice the ranks: half of the rows is never seen", first_step=1)),
    Fault("no-labels", ("non-finite", "zero-gradient"), "the rank", "data", inject.no_labels,
          "no token of one rank's rows has a label: NaN loss, no gradient"),
    _chance(100, Fault("label-noise", _OUTLIER, "the odd rank", "data", inject.label_noise,
          "one rank's labels are random")),
    _chance(100, Fault("other-distribution", _OUTLIER, "the odd rank", "data", inject.other_distribution,
          "one rank's rows are random tokens, another data set than that of the others")),
)

_BEFORE = (
    _before("torch-seed", _SEED, "seed", inject.torch_seed, "one rank's torch generator has another state"),
    _before("numpy-seed", _SEED, "seed", inject.numpy_seed, "one rank's numpy generator has another state"),
    _before("python-seed", _SEED, "seed", inject.python_seed, "one rank's random module has another state"),
    _before("initial-weights-tensor", _WEIGHTS, "weights", inject.other_tensor,
            "one tensor of one rank has other values", stages=_REPLICATED),
    _before("initial-weights-bit", _WEIGHTS, "weights", inject.other_bit,
            "one bit of one weight of one rank differs", stages=_REPLICATED),
    _before("learning-rate", _CONFIG, "hyper-parameter", inject.learning_rate,
            "one rank's learning rate is twice that of the others", size=2.0),
    _before("weight-decay", _CONFIG, "hyper-parameter", inject.weight_decay,
            "one rank's weight decay is 0.05 more", size=0.05),
    _before("config-value", _CONFIG, "hyper-parameter", inject.config_value,
            "one rank's ds_config clips gradients at another norm", size=0.3),
    _before("environment-cublas", _CONFIG, "environment",
            partial(inject.environment, "CUBLAS_WORKSPACE_CONFIG", ":16:8"),
            "CUBLAS_WORKSPACE_CONFIG differs on one rank"),
    _before("environment-omp", _CONFIG, "environment", partial(inject.environment, "OMP_NUM_THREADS", "3"),
            "OMP_NUM_THREADS differs on one rank"),
    _before("environment-nccl", _CONFIG, "environment", partial(inject.environment, "NCCL_ALGO", "Tree"),
            "NCCL_ALGO differs on one rank"),
)

_GRADIENTS = (
    Fault("nan-loss", ("non-finite",), "the rank", "loss", inject.nan_loss, "one rank's loss is NaN"),
    Fault("inf-gradient", ("non-finite",), "the rank", "gradient", inject.inf_gradient,
          "one element of one parameter's gradient is infinite at one step"),
    Fault("bit-flip", ("non-finite", "outlier-rank"), "the rank", "gradient", inject.bit_flip,
          "the top exponent bit of one gradient element flips at one step (silent data corruption)"),
    Fault("zero-gradient", ("zero-gradient",), "the rank", "gradient", inject.zero_gradient,
          "one rank's loss is fine and its gradient is zero (a detached graph)"),
    _chance(300, Fault("gradient-scaled-1.1", _OUTLIER, "the odd rank", "gradient", inject.scaled_gradient,
          "one rank's gradient is 1.1 times too large", size=1.1)),
    _chance(100, Fault("gradient-scaled-1.5", _OUTLIER, "the odd rank", "gradient", inject.scaled_gradient,
          "one rank's gradient is 1.5 times too large", size=1.5)),
    _chance(60, Fault("gradient-scaled-1000", _OUTLIER, "the odd rank", "gradient", inject.scaled_gradient,
          "one rank's gradient is 1000 times too large", size=1000.0)),
    _chance(300, Fault("gradient-negated", _OUTLIER, "the odd rank", "gradient", inject.scaled_gradient,
          "one rank climbs instead of descending", size=-1.0)),
    _chance(100, Fault("gradient-noise-1.0", _OUTLIER, "the odd rank", "gradient", inject.noisy_gradient,
          "noise as large as the gradient is added on one rank")),
    _chance(300, Fault("gradient-noise-0.5", _OUTLIER, "the odd rank", "gradient", inject.noisy_gradient,
          "noise half as large as the gradient is added on one rank", size=0.5)),
    _chance(300, Fault("stuck-gradient", _OUTLIER, "the odd rank", "gradient", inject.stuck_gradient,
          "one rank sends the gradient of an earlier step again and again (a stale buffer)")),
    _chance(300, Fault("frozen-layers", ("outlier-rank", "zero-gradient"), "the odd rank", "gradient",
          inject.frozen_layers, "all layers get a zero gradient on one rank, which trains the embeddings only")),
    # in the other stages the ranks' buckets then differ in size, and DeepSpeed's own reduction dies
    Fault("layer-without-gradient", ("zero-gradient", "outlier-rank"), "the odd rank", "gradient",
          inject.detached_layer, "the last layer takes no part in one rank's backward", stages=(0,)),
    _chance(60, Fault("loss-scaled", _OUTLIER, "the odd rank", "loss", inject.scaled_loss,
          "one rank forgets to divide its loss by four", size=4.0)),
    Fault("loss-summed", _OUTLIER, "the odd rank", "loss", inject.scaled_loss,
          "one rank sums its loss over 193 label tokens instead of averaging it", size=193.0,
          says=("no noise explains it", "its loss is multiplied by what the others' is not")),
    *(_chance(steps, Fault(f"layer-scaled-{size:g}", _OUTLIER, "the odd rank", "gradient", inject.scaled_layer,
          f"one rank's gradient of one block is {size:g} times what it should be", size=size, says=("layers.3",)))
      for size, steps in ((1.5, 200), (2.0, 100), (0.5, 100), (-1.0, 300), (0.0, 60))),
)

_CONDUCT = (
    Fault("eval-mode", _CONFIG, "the odd rank", "loss", inject.eval_mode,
          "one rank trains without dropout (model.eval() was left on)", says=("in evaluation mode",)),
    Fault("dropout-off", _CONFIG, "the odd rank", "loss", inject.dropout_off,
          "one rank's dropout layers are in evaluation mode, its model is not", says=("in evaluation mode",)),
    Fault("learning-rate-later", _CONFIG, "the odd rank", "hyper-parameter",
          partial(inject.later, "lr", inject.multiplied),
          "one rank's learning rate becomes three times that of the others in mid-training", size=3.0,
          says=("learning rate",)),
    Fault("weight-decay-later", _CONFIG, "the odd rank", "hyper-parameter",
          partial(inject.later, "weight_decay", inject.increased),
          "one rank's weight decay grows by 0.05 in mid-training", size=0.05, says=("weight decay",)),
    Fault("betas-later", _CONFIG, "the odd rank", "hyper-parameter",
          partial(inject.later, "betas", inject.first_beta),
          "one rank's first beta becomes 0.5 in mid-training", size=0.5, says=("betas",)),
    # in stage 0 DeepSpeed reduces what requires a gradient, and buckets of different sizes end its own reduction
    Fault("frozen-trained", _CONFIG, "the odd rank", "hyper-parameter", inject.unfrozen,
          "one rank trains a parameter that is frozen on the others", stages=(1, 2), says=("trainable flags",)),
)

_INPUT = (
    _early("contribution-missing", _AGGREGATION, "the rank", "reduction", corrupt.missing_contribution,
          "one rank sends zeros into the reduction", stages=_REDUCED, says=("rank {rank} 0.00 times",)),
    _early("contribution-doubled", _AGGREGATION, "the rank", "reduction", corrupt.doubled_contribution,
          "one rank's gradient is counted twice", stages=_REDUCED, says=("rank {rank} 2.00 times",)),
    _early("micro-batch-missing", _AGGREGATION, "the rank", "reduction", corrupt.missing_micro_batch,
          "one rank's last micro-batch never reaches the aggregate", stages=_REDUCED, accumulation=2),
    _early("micro-batch-missing-everywhere", _AGGREGATION, "nobody", "reduction",
          corrupt.missing_micro_batch_everywhere, "the last micro-batch of all ranks never reaches the aggregate",
          stages=_REDUCED, accumulation=2),
)

_REDUCTION = (
    _early("bucket-dropped", _UNREDUCED, "an owner", "reduction", corrupt.dropped_bucket,
          "the reduction of the first bucket is never called", stages=_REDUCED, says=("not reduced",)),
    _early("parameter-unreduced", _UNREDUCED, "an owner", "reduction", corrupt.unreduced_parameter,
          "one parameter takes no part in the reduction", stages=_REDUCED, says=("not reduced", "position")),
    # a half of two or three ranks may be one rank alone
    _early("wrong-group", ("aggregation-error", "unreduced-gradient"), "nobody", "reduction", corrupt.wrong_group,
          "the ranks' two halves reduce among themselves", stages=_REDUCED),
    _early("division-forgotten", _AGGREGATION, "nobody", "reduction", corrupt.forgotten_division,
          "the sum is not divided by the number of ranks", stages=_REDUCED,
          says=("{ranks} times the mean", "all 7 layers")),
    _early("bucket-stale", _AGGREGATION, "nobody", "reduction", corrupt.stale_bucket,
          "the first bucket's result is that of the step before, for good", stages=_REDUCED,
          says=("that of the step before",)),
    _early("bucket-tail-zeroed", _AGGREGATION, "nobody", "reduction", corrupt.zeroed_tail,
          "the last quarter of the first bucket comes back as zeros", size=0.25, stages=_REDUCED),
    _early("aggregate-noise", _AGGREGATION, "nobody", "reduction", corrupt.noisy_aggregate,
          "noise of 0.05 of its norm is added to the aggregate, the same on all ranks", size=0.05, stages=_REDUCED,
          says=("looks like noise",)),
    _early("aggregate-noise-one-rank", _AGGREGATION, "the receiver", "reduction", corrupt.noisy_aggregate_one_rank,
          "one rank receives the aggregate with noise of 0.05 of its norm", size=0.05, stages=_REDUCED),
    _early("aggregate-burst", _AGGREGATION, "nobody", "reduction", corrupt.noise_burst,
          "noise of ten times its norm is added to the aggregate at one step", size=10.0, stages=_REDUCED,
          says=("looks like noise",)),
    *(_early(f"aggregate-flip-byte-{byte}", _AGGREGATION, "nobody", "reduction", partial(corrupt.flipped_bit, byte),
          f"the top bit of byte {byte} of the first bucket's largest element flips at one step, on all ranks alike",
          stages=_REDUCED, dtypes=("fp32", "bf16") if byte < 2 else ("fp32",), says=("single element",))
      for byte in range(4)),
    _early("aggregate-flip-lowest-bit", _AGGREGATION, "nobody", "reduction", corrupt.flipped_lowest_bit,
          "the lowest bit of the same element, on all ranks alike: below rounding, and said to be", stages=_REDUCED,
          says=("single element",)),
    _early("aggregate-flip-one-rank", _AGGREGATION, "the odd rank", "reduction", corrupt.flipped_bit_one_rank,
          "the lowest bit of one element differs on one rank at one step: bits are compared", stages=(0,)),
    _early("gradients-not-cleared", _AGGREGATION, "nobody", "reduction", corrupt.gradients_not_cleared,
          "zero_grad does nothing: the gradients of the step before are in the sum", stages=(0,),
          says=("not cleared",)),
    _early("partition-not-cleared", _AGGREGATION, "nobody", "reduction", corrupt.partition_not_cleared,
          "the aggregate of the step before stays in the partition and is added", stages=(1, 2), says=("not cleared",)),
)

_UPDATE = (
    _early("applied-factor-4", _AGGREGATION, "nobody", "update", corrupt.wrong_factor,
          "the optimizer gets four times the aggregate (a wrong loss scale or clip factor)", size=4.0, stages=_REDUCED,
          says=("applied 4 times",)),
    _early("applied-factor-4-one-rank", _AGGREGATION, "the rank", "update", corrupt.wrong_factor_one_rank,
          "the same on one rank", size=4.0, stages=_REDUCED, says=("applied 4 times",)),
    _early("applied-noise", _AGGREGATION, "the rank", "update", corrupt.noisy_update,
          "noise of 0.05 of its norm between one rank's reduction and its optimizer", size=0.05, stages=_REDUCED,
          says=("no multiple",)),
    _early("update-skipped", _AGGREGATION, "the rank", "update", corrupt.skipped_update,
          "one rank's optimizer does nothing at one step", stages=_REDUCED, says=("did not step",)),
)

_REPLICAS = (
    _early("weight-changed", _DRIFT, "the odd rank", "replica", corrupt.changed_weight,
          "one bit of one weight of one rank changes after an update", stages=(0,),
          says=("of step {step}", "embedding.weight")),
    _early("frozen-parameter-changed", _DRIFT, "the odd rank", "replica", corrupt.changed_frozen_parameter,
          "one bit of one rank's frozen parameter changes", stages=_REDUCED, says=("of step {step}", "rescale.shift")),
    _early("buffer-changed", _DRIFT, "the odd rank", "replica", corrupt.changed_buffer,
          "one bit of one rank's buffer changes", stages=_REDUCED, says=("buffer rescale.gain",)),
    _early("optimizer-state-changed", _DRIFT, "the odd rank", "replica", corrupt.changed_optimizer_state,
          "one rank's running mean of one gradient element changes", stages=(0,), says=("optimizer exp_avg",)),
    _early("gathered-weights-stale", _DRIFT, "the odd rank", "replica", corrupt.stale_weights,
          "one rank keeps the old weights where it should receive another's update", stages=(1, 2),
          says=("of step {step}",)),
    _early("gathered-weights-bit", _DRIFT, "the odd rank", "replica", corrupt.corrupted_weights,
          "one bit of what one rank receives of the updated weights is wrong", stages=(1, 2), says=("of step {step}",)),
)
_retry = partial(Fault, first_step=EARLY, steps=2, stages=(0, 1), response=RETRY, repair_says=("repeated once",))
_majority = partial(Fault, first_step=EARLY, steps=2, stages=(0,), response=MAJORITY,
                    repair_says=("step {step}", "all replicas are equal again"))
_averaged = partial(Fault, first_step=EARLY, steps=4, stages=(0,), repair_says=("all replicas are equal again",))
_GAVE_UP = ("could not be made equal", "tried 3 times")
_SKIPPED, _NOISY = "one rank's optimizer does nothing at one step", "one rank applies a noisy gradient at one step"

_REPAIRS = (
    _retry("retry-burst", _AGGREGATION, "nobody", "reduction", passing.burst,
          "noise of ten times its norm is added to the aggregate at one step", size=10.0, says=("looks like noise",)),
    _retry("retry-flips-one-rank", _AGGREGATION, "the receiver", "reduction", passing.flips_one_rank,
          "one rank receives the aggregate of one step with flipped bits"),
    _retry("retry-contribution-missing", _AGGREGATION, "the rank", "reduction", passing.missing_contribution,
          "one rank sends zeros into one step's reduction", says=("rank {rank} 0.00 times",)),
    _retry("retry-bucket-dropped", _UNREDUCED, "an owner", "reduction", passing.dropped_bucket,
          "the reduction of one step's first bucket is never called", says=("not reduced",)),
    _retry("retry-burst-twice", _AGGREGATION, "nobody", "reduction", passing.burst_twice,
          "the same burst, and the first repetition is hit too", size=10.0, repair_says=("repeated twice",)),
    _retry("retry-burst-always", _AGGREGATION, "nobody", "reduction", passing.burst_always,
          "the same burst in every attempt of every step: cannot be repaired", size=10.0, repaired=False,
          repair_says=("repeated 3 times", "stayed wrong")),
    _retry("ordered-pieces-damaged", _AGGREGATION, "nobody", "reduction", passing.damaged_pieces,
          "what one rank adds up in an ordered reduction arrives damaged", response=ORDERED_RETRY),
    _majority("majority-update-skipped", _DRIFT, "the odd rank", "replica", passing.skipped_update, _SKIPPED),
    _majority("majority-weight-changed", _DRIFT, "the odd rank", "replica", passing.changed_weight,
          "one bit of one weight of one rank changes", says=("of step {step}", "embedding.weight")),
    _majority("majority-frozen-changed", _DRIFT, "the odd rank", "replica", passing.changed_frozen_parameter,
          "one bit of one rank's frozen parameter changes", says=("rescale.shift",)),
    _majority("majority-buffer-changed", _DRIFT, "the odd rank", "replica", passing.changed_buffer,
          "one bit of one rank's buffer changes", says=("buffer rescale.gain",)),
    _majority("majority-optimizer-changed", _DRIFT, "the odd rank", "replica", passing.changed_optimizer_state,
          "one bit of one rank's running mean changes", says=("optimizer exp_avg",)),
    _majority("majority-signs-received", (*_DRIFT, *_AGGREGATION), "the odd rank", "replica", passing.wrong_signs,
          "one rank receives every aggregate with some wrong signs: it drifts and is repaired at every step",
          again=True, repair_says=("all replicas are equal again",)),
    _majority("majority-two-ranks", _DRIFT, "the pair or nobody", "replica", passing.changed_on_two_ranks,
          "two ranks are damaged in different tensors: each tensor has a majority of its own"),
    _majority("majority-tie", _DRIFT, "nobody", "replica", passing.no_majority,
          "half of the ranks skip an update: nobody can say who is right", repaired=False,
          repair_says=("no version of", "more than half of the ranks")),
    _majority("majority-copy-damaged", _DRIFT, "the odd rank", "replica", passing.repair_damaged,
          "a skipped update, and the healthy bits arrive damaged the first time"),
    _majority("majority-copy-always-damaged", _DRIFT, "the odd rank", "replica", passing.repair_always_damaged,
          "a skipped update, and the healthy bits never arrive intact", repaired=False, repair_says=_GAVE_UP),
    *(_averaged(f"{response.name}-{name}", _DRIFT, "the odd rank", "replica", make, description, response=response,
          size=0.05)
      for response in (MEAN, PERIODIC, DYNAMIC)
      for name, make, description in (("update-skipped", passing.skipped_update, _SKIPPED),
                                      ("update-noisy", passing.noisy_update, _NOISY))),
    _averaged("mean-average-damaged", _DRIFT, "the odd rank", "replica", passing.repair_damaged,
          "a skipped update, and the average arrives damaged the first time", response=MEAN),
    _averaged("mean-average-always-damaged", _DRIFT, "the odd rank", "replica", passing.repair_always_damaged,
          "a skipped update, and the average never arrives intact", response=MEAN, repaired=False,
          repair_says=_GAVE_UP),
    _averaged("dynamic-average-damaged", _DRIFT, "the odd rank", "replica", passing.repair_damaged,
          "a skipped update, and the overlapped average arrives damaged the first time", response=DYNAMIC),
)
# fmt: on

_ALL = (*_DATA, *_BEFORE, *_GRADIENTS, *_CONDUCT, *_INPUT, *_REDUCTION, *_UPDATE, *_REPLICAS, *_REPAIRS)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}
