"""What the drill injects: faults of data, seeds, weights, hyper-parameters, gradients, their reduction and replicas.

Those at the end are answered: the training has a response switched on, and must come out repaired.

    fault = FAULTS["gradient-scaled-1.5"]
    injection = fault.inject(strike, 2)             # what changes on rank 2; NOTHING where nothing does

A line of the tables says what goes wrong (:mod:`inputs`, :mod:`reduction`, :mod:`update`), when and on whom
(:mod:`when`), and what must come of it (:mod:`fault`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ds_silent.drill.faults import inputs, reduction, update
from ds_silent.drill.faults.fault import EARLY, Fault, Where
from ds_silent.drill.faults.responses import DYNAMIC, MAJORITY, MEAN, ORDERED_RETRY, PERIODIC, RETRY
from ds_silent.drill.faults.when import Maker, attempts, both, from_on, once, one
from ds_silent.records import EventKind

BEFORE = 0


def _chance(steps: int, fault: Fault) -> Fault:
    """Found by a sequential test, which has to see some steps first."""
    return replace(fault, deterministic=False, steps=steps)


def _before(
    name: str,
    kinds: tuple[EventKind, ...],
    strikes: Where,
    make: Maker,
    description: str,
    size: float = 1.0,
    stages: tuple[int, ...] = (0, 1, 2, 3),
) -> Fault:
    """Found before the training, by comparing the ranks."""
    return Fault(
        name, kinds, "the odd rank", strikes, one(make), description, first_step=BEFORE, size=size, stages=stages
    )


_early = partial(Fault, first_step=EARLY)

_ORDER: tuple[EventKind, ...] = ("data-order-mismatch", "low-coverage")
_DUPLICATE: tuple[EventKind, ...] = ("duplicate-data",)
_OUTLIER: tuple[EventKind, ...] = ("outlier-rank",)
_OBJECTIVE: tuple[EventKind, ...] = ("objective-mismatch",)
_CONFIG: tuple[EventKind, ...] = ("config-mismatch",)
_SEED: tuple[EventKind, ...] = ("seed-mismatch",)
_WEIGHTS: tuple[EventKind, ...] = ("initial-weights-mismatch",)
_AGGREGATION: tuple[EventKind, ...] = ("aggregation-error",)
_UNREDUCED: tuple[EventKind, ...] = ("unreduced-gradient",)
_DRIFT: tuple[EventKind, ...] = ("replica-drift",)
_REPLICATED = (0, 1, 2)  # under ZeRO-3 each number has one owner: no two ranks could disagree
_REDUCED = (0, 1, 2)  # where the drill reaches into the reduction

_missing = partial(reduction.weighted_contribution, 0.0)
_lowest_bit = partial(reduction.flipped_bit, 0)
_damaged_once = both(once(update.skipped), from_on(partial(update.damaged_repair, 1)))
_damaged_always = both(once(update.skipped), from_on(partial(update.damaged_repair, None)))

# A table reads better than what a formatter makes of it.
# fmt: off
_DATA = (
    Fault("same-batch-everywhere", _DUPLICATE, "all ranks", "data", from_on(inputs.same_rows),
          "every rank gets the first rank's rows (a sampler that nobody told of the ranks)"),
    Fault("same-batch-everywhere-without-ids", _DUPLICATE, "all ranks", "data", from_on(inputs.same_rows),
          "the same, and the script does not tell which rows it takes", ids=False),
    Fault("same-batch-pair", _DUPLICATE, "the pair", "data", one(from_on(inputs.neighbours_rows)),
          "one rank gets its neighbour's rows"),
    Fault("same-batch-pair-without-ids", _DUPLICATE, "the pair", "data", one(from_on(inputs.neighbours_rows)),
          "the same, and the script does not tell which rows it takes", ids=False),
    Fault("same-content-other-ids", _DUPLICATE, "the pair", "data", one(from_on(inputs.neighbours_content)),
          "one rank computes on its neighbour's rows under ids of its own: only the gradients can tell"),
    _chance(12, Fault("repeated-batch", _ORDER, "the rank", "data", one(from_on(inputs.repeated_rows)),
          "one rank's loader is stuck: the same rows again and again")),
    Fault("pass-begun-anew", _ORDER, "all ranks", "data", from_on(inputs.pass_begun_anew),
          "every rank begins the epoch's rows anew in the middle of it, as after a resume that forgets its place"),
    _chance(40, Fault("sampler-seed-one-rank", _ORDER, "the rank or all", "data", one(inputs.other_seed),
          "one rank shuffles with another seed under a sharded sampler", first_step=1)),
    _chance(40, Fault("sampler-seed-every-rank", _ORDER, "all ranks", "data", inputs.seed_of_its_own,
          "every rank shuffles with a seed of its own: a third of the rows is never seen", first_step=1)),
    Fault("sampler-world-size-one", _DUPLICATE, "all ranks", "data", inputs.sampler_alone,
          "every rank's sampler believes to be alone", first_step=1),
    _chance(40, Fault("sampler-world-size-twice", ("low-coverage", "data-order-mismatch"), "all ranks", "data",
          inputs.sampler_twice, "the sampler counts twice the ranks: half of the rows is never seen", first_step=1)),
    Fault("no-labels", ("non-finite", "zero-gradient"), "the rank", "data", one(from_on(inputs.no_labels)),
          "no token of one rank's rows has a label: NaN loss, no gradient"),
    _chance(100, Fault("label-noise", _OUTLIER, "the odd rank", "data", one(from_on(inputs.label_noise)),
          "one rank's labels are random")),
    _chance(100, Fault("other-distribution", _OUTLIER, "the odd rank", "data", one(from_on(inputs.other_distribution)),
          "one rank's rows are random tokens, another data set than that of the others")),
)

_BEFORE = (
    _before("torch-seed", _SEED, "seed", inputs.torch_seed, "one rank's torch generator has another state"),
    _before("numpy-seed", _SEED, "seed", inputs.numpy_seed, "one rank's numpy generator has another state"),
    _before("python-seed", _SEED, "seed", inputs.python_seed, "one rank's random module has another state"),
    _before("initial-weights-tensor", _WEIGHTS, "weights", inputs.other_tensor,
            "one tensor of one rank has other values", stages=_REPLICATED),
    _before("initial-weights-bit", _WEIGHTS, "weights", inputs.other_bit,
            "one bit of one weight of one rank differs", stages=_REPLICATED),
    _before("learning-rate", _CONFIG, "hyper-parameter", partial(inputs.hyper_parameter, "lr", inputs.multiplied),
            "one rank's learning rate is twice that of the others", size=2.0),
    _before("weight-decay", _CONFIG, "hyper-parameter",
            partial(inputs.hyper_parameter, "weight_decay", inputs.increased),
            "one rank's weight decay is 0.05 more", size=0.05),
    _before("config-value", _CONFIG, "hyper-parameter", inputs.config_value,
            "one rank's ds_config clips gradients at another norm", size=0.3),
    _before("environment-cublas", _CONFIG, "environment",
            partial(inputs.environment, "CUBLAS_WORKSPACE_CONFIG", ":16:8"),
            "CUBLAS_WORKSPACE_CONFIG differs on one rank"),
    _before("environment-omp", _CONFIG, "environment", partial(inputs.environment, "OMP_NUM_THREADS", "3"),
            "OMP_NUM_THREADS differs on one rank"),
    _before("environment-nccl", _CONFIG, "environment", partial(inputs.environment, "NCCL_ALGO", "Tree"),
            "NCCL_ALGO differs on one rank"),
    _before("dropout-p", _CONFIG, "hyper-parameter", inputs.dropout_probability,
            "one rank's dropout has p = 0 from the start", size=0.0),
    # a wrapper's flat copies of the parameters are one piece
    replace(_before("optimizer-without-layer", _CONFIG, "hyper-parameter", inputs.optimizer_without_layer,
            "one rank's optimizer does not hold the last layer", stages=(0,)), dtypes=("fp32",)),
)

_GRADIENTS = (
    Fault("nan-loss", ("non-finite",), "the rank", "loss", one(from_on(inputs.nan_loss)), "one rank's loss is NaN"),
    Fault("inf-gradient", ("non-finite",), "the rank", "gradient", one(once(inputs.infinite_element)),
          "one element of one parameter's gradient is infinite at one step"),
    Fault("bit-flip", ("non-finite", "outlier-rank"), "the rank", "gradient", one(once(inputs.flipped_element)),
          "the top exponent bit of one gradient element flips at one step (silent data corruption)"),
    Fault("zero-gradient", ("zero-gradient",), "the rank", "gradient", one(from_on(inputs.zero_gradient)),
          "one rank's loss is fine and its gradient is zero (a detached graph)"),
    _chance(300, Fault("gradient-scaled-1.1", _OUTLIER, "the odd rank", "gradient",
          one(from_on(inputs.scaled_gradient)), "one rank's gradient is 1.1 times too large", size=1.1)),
    _chance(100, Fault("gradient-scaled-1.5", _OUTLIER, "the odd rank", "gradient",
          one(from_on(inputs.scaled_gradient)), "one rank's gradient is 1.5 times too large", size=1.5)),
    _chance(60, Fault("gradient-scaled-1000", _OUTLIER, "the odd rank", "gradient",
          one(from_on(inputs.scaled_gradient)), "one rank's gradient is 1000 times too large", size=1000.0)),
    _chance(60, Fault("gradient-scaled-0.045", _OUTLIER, "the odd rank", "gradient",
          one(from_on(inputs.scaled_gradient)), "one rank's gradient is 22 times too small", size=1 / 22)),
    _chance(60, Fault("gradient-clipped", _OUTLIER, "the odd rank", "gradient", one(from_on(inputs.clipped_gradient)),
          "one rank clips each parameter's gradient before the reduction", size=0.005, says=("clips before",))),
    _chance(300, Fault("gradient-negated", _OUTLIER, "the odd rank", "gradient", one(from_on(inputs.scaled_gradient)),
          "one rank climbs instead of descending", size=-1.0)),
    _chance(100, Fault("gradient-noise-1.0", _OUTLIER, "the odd rank", "gradient", one(from_on(inputs.noisy_gradient)),
          "noise as large as the gradient is added on one rank")),
    _chance(300, Fault("gradient-noise-0.5", _OUTLIER, "the odd rank", "gradient", one(from_on(inputs.noisy_gradient)),
          "noise half as large as the gradient is added on one rank", size=0.5)),
    _chance(300, Fault("stuck-gradient", _OUTLIER, "the odd rank", "gradient", one(inputs.stuck_gradient),
          "one rank sends the gradient of an earlier step again and again (a stale buffer)")),
    _chance(300, Fault("frozen-layers", ("outlier-rank", "zero-gradient"), "the odd rank", "gradient",
          one(from_on(inputs.frozen_layers)),
          "all layers get a zero gradient on one rank, which trains the embeddings only")),
    # in the other stages the ranks' buckets then differ in size, and DeepSpeed's own reduction dies
    Fault("layer-without-gradient", ("zero-gradient", "outlier-rank"), "the odd rank", "gradient",
          one(once(inputs.detached_layer)), "the last layer takes no part in one rank's backward", stages=(0,)),
    _chance(60, Fault("task-out-of-phase", _OUTLIER, "the odd rank", "loss", inputs.out_of_phase,
          "of two tasks in turn, one with a hundred times the loss, one rank has the other one", size=100.0,
          says=("out of phase",))),
    Fault("loss-scaled", _OBJECTIVE, "the odd rank", "loss", one(from_on(inputs.scaled_loss)),
          "one rank forgets to divide its loss by four", size=4.0, says=("MulBackward0 x 4",)),
    Fault("loss-quartered", _OBJECTIVE, "the odd rank", "loss", one(from_on(inputs.scaled_loss)),
          "one rank divides its loss by four once more", size=0.25, says=("MulBackward0 x 0.25",)),
    Fault("loss-multiplied", _OBJECTIVE, "the odd rank", "loss", one(from_on(inputs.scaled_loss)),
          "one rank multiplies its loss by the number of its label tokens", size=193.0, says=("MulBackward0 x 193",)),
    Fault("loss-summed", _OBJECTIVE, "the odd rank", "loss", one(once(partial(inputs.other_loss, "reduction", "sum"))),
          "one rank sums its loss over its label tokens instead of averaging it", says=("NllLossBackward0 (sum)",)),
    Fault("class-weights", _OBJECTIVE, "the odd rank", "loss", one(once(inputs.class_weights)),
          "one rank's loss weighs half of the classes ten times", size=10.0, says=("(mean, class weights)",)),
    Fault("label-smoothing", _OBJECTIVE, "the odd rank", "loss",
          one(once(partial(inputs.other_loss, "label_smoothing", 0.1))),
          "one rank smooths its labels", size=0.1, says=("MulBackward1 x 0.9",)),
    *(_chance(steps, Fault(f"layer-scaled-{size:g}", _OUTLIER, "the odd rank", "gradient",
          one(from_on(inputs.scaled_layer)),
          f"one rank's gradient of one block is {size:g} times what it should be", size=size, says=("layers.3",)))
      for size, steps in ((1.5, 200), (2.0, 100), (0.5, 100), (-1.0, 300), (0.0, 60))),
)

_CONDUCT = (
    Fault("eval-mode", _CONFIG, "the odd rank", "loss", one(once(inputs.eval_mode)),
          "one rank trains without dropout (model.eval() was left on)", says=("in evaluation mode",)),
    Fault("dropout-off", _CONFIG, "the odd rank", "loss", one(once(inputs.dropout_off)),
          "one rank's dropout layers are in evaluation mode, its model is not", says=("in evaluation mode",)),
    Fault("dropout-p-later", _CONFIG, "the odd rank", "hyper-parameter", one(once(inputs.dropout_probability_later)),
          "one rank's dropout becomes p = 0 in mid-training", size=0.0, says=("settings of", "p 0.0 on rank {rank}")),
    # under ZeRO-2 gradients come in another order then, and buckets of different sizes end DeepSpeed's own reduction
    Fault("autocast", _CONFIG, "the odd rank", "hyper-parameter", one(once(inputs.autocast)),
          "one rank's forward enters autocast in mid-training", stages=(0, 1, 3), says=("bfloat16 on rank {rank}",)),
    Fault("learning-rate-later", _CONFIG, "the odd rank", "hyper-parameter",
          one(once(partial(inputs.hyper_parameter_later, "lr", inputs.multiplied))),
          "one rank's learning rate becomes three times that of the others in mid-training", size=3.0,
          says=("learning rate",)),
    Fault("weight-decay-later", _CONFIG, "the odd rank", "hyper-parameter",
          one(once(partial(inputs.hyper_parameter_later, "weight_decay", inputs.increased))),
          "one rank's weight decay grows by 0.05 in mid-training", size=0.05, says=("weight decay",)),
    Fault("betas-later", _CONFIG, "the odd rank", "hyper-parameter",
          one(once(partial(inputs.hyper_parameter_later, "betas", inputs.first_beta))),
          "one rank's first beta becomes 0.5 in mid-training", size=0.5, says=("betas",)),
    # in stage 0 DeepSpeed reduces what requires a gradient, and buckets of different sizes end its own reduction
    Fault("frozen-trained", _CONFIG, "the odd rank", "hyper-parameter", one(once(inputs.unfrozen)),
          "one rank trains a parameter that is frozen on the others", stages=(1, 2), says=("trainable flags",)),
)

_INPUT = (
    _early("contribution-missing", _AGGREGATION, "the rank", "reduction", one(from_on(_missing)),
          "one rank sends zeros into the reduction", stages=_REDUCED, says=("rank {rank} 0.00 times",)),
    _early("contribution-doubled", _AGGREGATION, "the rank", "reduction",
          one(from_on(partial(reduction.weighted_contribution, 2.0))),
          "one rank's gradient is counted twice", stages=_REDUCED, says=("rank {rank} 2.00 times",)),
    _early("micro-batch-missing", _AGGREGATION, "the rank", "reduction", one(from_on(reduction.missing_micro_batch)),
          "one rank's last micro-batch never reaches the aggregate", stages=_REDUCED, accumulation=2),
    _early("micro-batch-missing-everywhere", _AGGREGATION, "nobody", "reduction",
          from_on(reduction.missing_micro_batch), "the last micro-batch of all ranks never reaches the aggregate",
          stages=_REDUCED, accumulation=2),
)

_REDUCTION = (
    _early("bucket-dropped", _UNREDUCED, "an owner", "reduction", from_on(reduction.dropped_bucket),
          "the reduction of the first bucket is never called", stages=_REDUCED, says=("not reduced",)),
    _early("parameter-unreduced", _UNREDUCED, "an owner", "reduction", from_on(reduction.unreduced_parameter),
          "one parameter takes no part in the reduction", stages=_REDUCED, says=("not reduced", "position")),
    # a half of two or three ranks may be one rank alone
    _early("wrong-group", ("aggregation-error", "unreduced-gradient"), "nobody", "reduction",
          from_on(reduction.wrong_group), "the ranks' two halves reduce among themselves", stages=_REDUCED),
    _early("division-forgotten", _AGGREGATION, "nobody", "reduction", from_on(reduction.forgotten_division),
          "the sum is not divided by the number of ranks", stages=_REDUCED,
          says=("{ranks} times the mean", "all 7 layers")),
    _early("bucket-stale", _AGGREGATION, "nobody", "reduction", reduction.stale_bucket,
          "the first bucket's result is that of the step before, for good", stages=_REDUCED,
          says=("that of the step before",)),
    _early("bucket-tail-zeroed", _AGGREGATION, "nobody", "reduction", from_on(reduction.zeroed_tail),
          "the last quarter of the first bucket comes back as zeros", size=0.25, stages=_REDUCED),
    _early("aggregate-noise", _AGGREGATION, "nobody", "reduction", from_on(reduction.noisy_result),
          "noise of 0.05 of its norm is added to the aggregate, the same on all ranks", size=0.05, stages=_REDUCED,
          says=("looks like noise",)),
    _early("aggregate-noise-one-rank", _AGGREGATION, "the receiver", "reduction",
          one(from_on(reduction.noisy_result_of_its_own)),
          "one rank receives the aggregate with noise of 0.05 of its norm", size=0.05, stages=_REDUCED),
    _early("aggregate-burst", _AGGREGATION, "nobody", "reduction", once(reduction.noisy_result),
          "noise of ten times its norm is added to the aggregate at one step", size=10.0, stages=_REDUCED,
          says=("looks like noise",)),
    *(_early(f"aggregate-flip-byte-{byte}", _AGGREGATION, "nobody", "reduction",
          once(partial(reduction.flipped_bit, 8 * byte + 7)),
          f"the top bit of byte {byte} of the first bucket's largest element flips at one step, on all ranks alike",
          stages=_REDUCED, dtypes=("fp32", "bf16") if byte < 2 else ("fp32",), says=("single element",))
      for byte in range(4)),
    _early("aggregate-flip-lowest-bit", _AGGREGATION, "nobody", "reduction", once(_lowest_bit),
          "the lowest bit of the same element, on all ranks alike: below rounding, and said to be", stages=_REDUCED,
          says=("single element",)),
    _early("aggregate-flip-one-rank", _AGGREGATION, "the odd rank", "reduction", one(once(_lowest_bit)),
          "the lowest bit of one element differs on one rank at one step: bits are compared", stages=(0,)),
    _early("gradients-not-cleared", _AGGREGATION, "nobody", "reduction", reduction.gradients_not_cleared,
          "zero_grad does nothing: the gradients of the step before are in the sum", stages=(0,),
          says=("not cleared",)),
    _early("partition-not-cleared", _AGGREGATION, "nobody", "reduction", reduction.partition_not_cleared,
          "the aggregate of the step before stays in the partition and is added", stages=(1, 2), says=("not cleared",)),
)

_UPDATE = (
    _early("applied-factor-4", _AGGREGATION, "nobody", "update", from_on(update.wrong_factor),
          "the optimizer gets four times the aggregate (a wrong loss scale or clip factor)", size=4.0, stages=_REDUCED,
          says=("applied 4 times",)),
    _early("applied-factor-4-one-rank", _AGGREGATION, "the rank", "update", one(from_on(update.wrong_factor)),
          "the same on one rank", size=4.0, stages=_REDUCED, says=("applied 4 times",)),
    _early("applied-noise", _AGGREGATION, "the rank", "update", one(from_on(update.noisy_gradient_of_its_own)),
          "noise of 0.05 of its norm between one rank's reduction and its optimizer", size=0.05, stages=_REDUCED,
          says=("no multiple",)),
    _early("parameter-trained-late", ("unreduced-gradient", "update-mismatch"), "nobody", "hyper-parameter",
          once(inputs.unfrozen), "a frozen parameter begins to be trained, which neither wrapper nor optimizer knows",
          says=("rescale.shift",)),
    _early("update-skipped", _AGGREGATION, "the rank", "update", one(once(update.skipped)),
          "one rank's optimizer does nothing at one step", stages=_REDUCED, says=("did not step",)),
)

_REPLICAS = (
    _early("weight-changed", _DRIFT, "the odd rank", "replica", one(once(update.weight_bit)),
          "one bit of one weight of one rank changes after an update", stages=(0,),
          says=("of step {step}", "embedding.weight")),
    _early("frozen-parameter-changed", _DRIFT, "the odd rank", "replica",
          one(once(partial(update.in_memory, update.frozen_bit))),
          "one bit of one rank's frozen parameter changes", stages=_REDUCED, says=("of step {step}", "rescale.shift")),
    _early("buffer-changed", _DRIFT, "the odd rank", "replica", one(once(partial(update.in_memory, update.buffer_bit))),
          "one bit of one rank's buffer changes", stages=_REDUCED, says=("buffer rescale.gain",)),
    _early("optimizer-state-changed", _DRIFT, "the odd rank", "replica",
          one(once(partial(update.in_memory, update.halved_moment))),
          "one rank's running mean of one gradient element changes", stages=(0,), says=("optimizer exp_avg",)),
    _early("gathered-weights-stale", _DRIFT, "the odd rank", "replica", one(from_on(update.stale_weights)),
          "one rank keeps the old weights where it should receive another's update", stages=(1, 2),
          says=("of step {step}",)),
    _early("gathered-weights-bit", _DRIFT, "the odd rank", "replica", one(from_on(update.corrupted_weights)),
          "one bit of what one rank receives of the updated weights is wrong", stages=(1, 2), says=("of step {step}",)),
)
_retry = partial(Fault, first_step=EARLY, steps=2, stages=(0, 1), response=RETRY, repair_says=("repeated once",))
_majority = partial(Fault, first_step=EARLY, steps=2, stages=(0,), response=MAJORITY,
                    repair_says=("step {step}", "all replicas are equal again"))
_averaged = partial(Fault, first_step=EARLY, steps=4, stages=(0,), repair_says=("all replicas are equal again",))
_GAVE_UP = ("could not be made equal", "tried 3 times")
_SKIPPED, _NOISY = "one rank's optimizer does nothing at one step", "one rank applies a noisy gradient at one step"

_REPAIRS = (
    _retry("retry-burst", _AGGREGATION, "nobody", "reduction", once(reduction.noisy_result),
          "noise of ten times its norm is added to the aggregate at one step", size=10.0, says=("looks like noise",)),
    _retry("retry-flips-one-rank", _AGGREGATION, "the receiver", "reduction", one(once(reduction.flipped_bits)),
          "one rank receives the aggregate of one step with flipped bits"),
    _retry("retry-contribution-missing", _AGGREGATION, "the rank", "reduction", one(once(_missing)),
          "one rank sends zeros into one step's reduction", says=("rank {rank} 0.00 times",)),
    _retry("retry-bucket-dropped", _UNREDUCED, "an owner", "reduction", once(reduction.dropped_bucket),
          "the reduction of one step's first bucket is never called", says=("not reduced",)),
    _retry("retry-burst-twice", _AGGREGATION, "nobody", "reduction", once(attempts(reduction.noisy_result, 2)),
          "the same burst, and the first repetition is hit too", size=10.0, repair_says=("repeated twice",)),
    _retry("retry-burst-always", _AGGREGATION, "nobody", "reduction", from_on(attempts(reduction.noisy_result)),
          "the same burst in every attempt of every step: cannot be repaired", size=10.0, repaired=False,
          repair_says=("repeated 3 times", "stayed wrong")),
    _retry("ordered-pieces-damaged", _AGGREGATION, "nobody", "reduction", one(once(reduction.damaged_pieces)),
          "what one rank adds up in an ordered reduction arrives damaged", response=ORDERED_RETRY),
    _majority("majority-update-skipped", _DRIFT, "the odd rank", "replica", one(once(update.skipped)), _SKIPPED),
    _majority("majority-weight-changed", _DRIFT, "the odd rank", "replica", one(once(update.weight_bit)),
          "one bit of one weight of one rank changes", says=("of step {step}", "embedding.weight")),
    _majority("majority-frozen-changed", _DRIFT, "the odd rank", "replica",
          one(once(partial(update.in_update, update.frozen_bit))),
          "one bit of one rank's frozen parameter changes", says=("rescale.shift",)),
    _majority("majority-buffer-changed", _DRIFT, "the odd rank", "replica",
          one(once(partial(update.in_update, update.buffer_bit))),
          "one bit of one rank's buffer changes", says=("buffer rescale.gain",)),
    _majority("majority-optimizer-changed", _DRIFT, "the odd rank", "replica",
          one(once(partial(update.in_update, update.moment_bit))),
          "one bit of one rank's running mean changes", says=("optimizer exp_avg",)),
    _majority("majority-signs-received", (*_DRIFT, *_AGGREGATION), "the odd rank", "replica",
          one(from_on(reduction.wrong_signs)),
          "one rank receives every aggregate with some wrong signs: it drifts and is repaired at every step",
          again=True, repair_says=("all replicas are equal again",)),
    _majority("majority-two-ranks", _DRIFT, "the pair or nobody", "replica", once(update.bits_of_two),
          "two ranks are damaged in different tensors: each tensor has a majority of its own"),
    _majority("majority-tie", _DRIFT, "nobody", "replica", once(update.no_majority),
          "half of the ranks skip an update: nobody can say who is right", repaired=False,
          repair_says=("no version of", "more than half of the ranks")),
    _majority("majority-copy-damaged", _DRIFT, "the odd rank", "replica", one(_damaged_once),
          "a skipped update, and the healthy bits arrive damaged the first time"),
    _majority("majority-copy-always-damaged", _DRIFT, "the odd rank", "replica", one(_damaged_always),
          "a skipped update, and the healthy bits never arrive intact", repaired=False, repair_says=_GAVE_UP),
    *(_averaged(f"{response.name}-{name}", _DRIFT, "the odd rank", "replica", make, description, response=response,
          size=0.05)
      for response in (MEAN, PERIODIC, DYNAMIC)
      for name, make, description in (("update-skipped", one(once(update.skipped)), _SKIPPED),
                                      ("update-noisy", one(once(update.noisy_gradient)), _NOISY))),
    _averaged("mean-average-damaged", _DRIFT, "the odd rank", "replica", one(_damaged_once),
          "a skipped update, and the average arrives damaged the first time", response=MEAN),
    _averaged("mean-average-always-damaged", _DRIFT, "the odd rank", "replica", one(_damaged_always),
          "a skipped update, and the average never arrives intact", response=MEAN, repaired=False,
          repair_says=_GAVE_UP),
    _averaged("dynamic-average-damaged", _DRIFT, "the odd rank", "replica", one(_damaged_once),
          "a skipped update, and the overlapped average arrives damaged the first time", response=DYNAMIC),
)
# fmt: on

_ALL = (*_DATA, *_BEFORE, *_GRADIENTS, *_CONDUCT, *_INPUT, *_REDUCTION, *_UPDATE, *_REPLICAS, *_REPAIRS)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}
