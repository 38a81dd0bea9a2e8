"""List what the drill injects: faults of data, seeds, weights, hyper-parameters, gradients, reductions and replicas.

    fault = FAULTS["gradient-scaled-1.5"]
    injection = fault.inject(target, 2)             # what changes on rank 2; NOTHING where nothing does

A line of the tables says what goes wrong (:mod:`inputs`, :mod:`aggregate`, :mod:`update`), when and on whom
(:mod:`injection`), what must come of it (:mod:`fault`), and in which framework it is otherwise. Faults with a response
are in :mod:`answered`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ds_silent.drill.faults import aggregate, inputs, update
from ds_silent.drill.faults.answered import ANSWERED
from ds_silent.drill.faults.fault import EARLY, Fault, Where
from ds_silent.drill.faults.injection import Maker, from_on, once, one
from ds_silent.records import EventKind

BEFORE = 0


def _chance(steps: int, fault: Fault) -> Fault:
    """Found by a sequential test, which has to see some steps first."""
    return replace(fault, deterministic=False, steps=steps)


def _before(
    name: str, kinds: tuple[EventKind, ...], strikes: Where, make: Maker, description: str, **more: Any
) -> Fault:
    """Found before the training, by comparing the ranks."""
    return Fault(name, kinds, "the odd rank", strikes, one(make), description, first_step=BEFORE, **more)


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

_missing = partial(aggregate.weighted_contribution, 0.0)
_lowest_bit = partial(aggregate.flipped_bit, 0)

# -- where a fault means nothing, and what is said of it instead -------------------------------------------------------

Reasons = dict[str, str]
_OWNED = "each number has one owner: nobody else holds it, so nobody could differ"
_IN_SHARDS: Reasons = {"fsdp2": _OWNED}
_OF_ONE_OWNER: Reasons = {"fsdp2": _OWNED, "megatron-1": _OWNED}
_CLIPPED = "the script clips by itself: there is no configuration to read it from"
_NO_CONFIG: Reasons = {"ddp": _CLIPPED, "fsdp2": _CLIPPED}
_THE_SCRIPTS = "between the reduction and the step a gradient is the script's to change"
_ALIKE: Reasons = {"ddp": f"{_THE_SCRIPTS}, on all ranks alike", "fsdp2": f"{_THE_SCRIPTS}, on all ranks alike"}
_WAITS: Reasons = {"fsdp2": "the ranks' reductions then differ, and FSDP2 itself waits for ever or dies"}
_WHOLE = "every rank has the whole gradient, none a partition of it"
_ALL_UPDATED = "every rank updates all weights, so none are gathered"
_NOT_GATHERED: Reasons = {
    "ddp": _ALL_UPDATED,
    "fsdp2": "gathered weights are freed behind each forward and backward: no copy of them is left to compare",
    "megatron-0": _ALL_UPDATED,
}
_MASTERS = "its optimizer holds copies of its own, and nobody is asked which parameters they stand for"
# Megatron's buffer holds zeros where no gradient came: a comparison with the other ranks finds that, some steps later
_ZEROS: dict[str, Any] = {"deterministic": False, "steps": 100}
# each rank keeps its own gradient of its own part of each bucket: a layer that lies in one part is its owner's alone,
# and no sum of whole gradients explains any other
_PARTS: dict[str, Any] = {"kinds": ("aggregation-error", "unreduced-gradient"), "who": "an owner"}

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
            "one tensor of one rank has other values", stages=_REPLICATED, not_applicable=_IN_SHARDS),
    _before("initial-weights-bit", _WEIGHTS, "weights", inputs.other_bit,
            "one bit of one weight of one rank differs", stages=_REPLICATED, not_applicable=_IN_SHARDS),
    _before("learning-rate", _CONFIG, "hyper-parameter", partial(inputs.hyper_parameter, "lr", operator.mul),
            "one rank's learning rate is twice that of the others", size=2.0),
    _before("weight-decay", _CONFIG, "hyper-parameter",
            partial(inputs.hyper_parameter, "weight_decay", operator.add),
            "one rank's weight decay is 0.05 more", size=0.05),
    _before("config-value", _CONFIG, "hyper-parameter", inputs.config_value,
            "one rank's ds_config clips gradients at another norm", size=0.3, not_applicable=_NO_CONFIG),
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
    _before("optimizer-without-layer", _CONFIG, "hyper-parameter", inputs.optimizer_without_layer,
            "one rank's optimizer does not hold the last layer", stages=(0,), dtypes=("fp32",),
            not_applicable={"megatron-1": "the optimizer holds a rank's own shards, which have no name"}),
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
          one(once(inputs.detached_layer)), "the last layer takes no part in one rank's backward", stages=(0,),
          not_applicable=_WAITS, expected_overrides={"megatron-0": _ZEROS, "megatron-1": _ZEROS},
          # Megatron ends where a bucket waits for a gradient that is none: so it reduces behind the backward
          wrapper_options={"ddp": {"find_unused_parameters": True}, "megatron": {"overlap_grad_reduce": False}}),
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
          one(once(partial(inputs.hyper_parameter_later, "lr", operator.mul))),
          "one rank's learning rate becomes three times that of the others in mid-training", size=3.0,
          says=("learning rate",)),
    Fault("weight-decay-later", _CONFIG, "the odd rank", "hyper-parameter",
          one(once(partial(inputs.hyper_parameter_later, "weight_decay", operator.add))),
          "one rank's weight decay grows by 0.05 in mid-training", size=0.05, says=("weight decay",)),
    Fault("betas-later", _CONFIG, "the odd rank", "hyper-parameter",
          one(once(partial(inputs.hyper_parameter_later, "betas", inputs.first_beta))),
          "one rank's first beta becomes 0.5 in mid-training", size=0.5, says=("betas",)),
    # in stage 0 DeepSpeed reduces what requires a gradient, and buckets of different sizes end its own reduction
    Fault("frozen-trained", _CONFIG, "the odd rank", "hyper-parameter", one(once(inputs.unfrozen)),
          "one rank trains a parameter that is frozen on the others", stages=(1, 2), says=("trainable flags",),
          not_applicable=_WAITS),
)

_INPUT = (
    _early("contribution-missing", _AGGREGATION, "the rank", "reduction", one(from_on(_missing)),
          "one rank sends zeros into the reduction", stages=_REDUCED, says=("rank {rank} 0.00 times",)),
    _early("contribution-doubled", _AGGREGATION, "the rank", "reduction",
          one(from_on(partial(aggregate.weighted_contribution, 2.0))),
          "one rank's gradient is counted twice", stages=_REDUCED, says=("rank {rank} 2.00 times",)),
    _early("micro-batch-missing", _AGGREGATION, "the rank", "reduction", one(from_on(aggregate.missing_micro_batch)),
          "one rank's last micro-batch never reaches the aggregate", stages=_REDUCED, accumulation=2),
    _early("micro-batch-missing-everywhere", _AGGREGATION, "nobody", "reduction",
          from_on(aggregate.missing_micro_batch), "the last micro-batch of all ranks never reaches the aggregate",
          stages=_REDUCED, accumulation=2),
)

_REDUCTION = (
    _early("bucket-dropped", _UNREDUCED, "an owner", "reduction", from_on(aggregate.dropped_bucket),
          "the reduction of the first bucket is never called", stages=_REDUCED, says=("not reduced",),
           # each rank keeps its own gradient of its own rows: no sum of whole gradients tells it from a lost part
           expected_overrides={"fsdp2": {"kinds": _AGGREGATION, "who": "nobody", "says": ("layers.3",)},
                               "megatron-1": {**_PARTS, "says": ("layers.3",)}}),
    _early("parameter-unreduced", _UNREDUCED, "an owner", "reduction", from_on(aggregate.unreduced_parameter),
          "one parameter takes no part in the reduction", stages=_REDUCED, says=("not reduced", "position"),
           not_applicable={"fsdp2": "a parameter that takes no part in the reduction is refused as the observer is "
                                    "attached"},
           expected_overrides={"megatron-1": {**_PARTS, "says": ("position",)}}),
    # a half of two or three ranks may be one rank alone
    _early("wrong-group", ("aggregation-error", "unreduced-gradient"), "nobody", "reduction",
          from_on(aggregate.wrong_group), "the ranks' two halves reduce among themselves", stages=_REDUCED,
           # of four ranks: layers in the first half's parts lack the second
           expected_overrides={"megatron-1": {"who": "the pair or nobody"}}),
    _early("division-forgotten", _AGGREGATION, "nobody", "reduction", from_on(aggregate.forgotten_division),
          "the sum is not divided by the number of ranks", stages=_REDUCED,
          says=("{ranks} times the mean", "all 7 layers")),
    _early("bucket-stale", _AGGREGATION, "nobody", "reduction", aggregate.stale_bucket,
          "the first bucket's result is that of the step before, for good", stages=_REDUCED,
          says=("that of the step before",)),
    _early("bucket-tail-zeroed", _AGGREGATION, "nobody", "reduction", from_on(aggregate.zeroed_tail),
          "the last quarter of the first bucket comes back as zeros", size=0.25, stages=_REDUCED),
    _early("aggregate-noise", _AGGREGATION, "nobody", "reduction", from_on(aggregate.noisy_result),
          "noise of 0.05 of its norm is added to the aggregate, the same on all ranks", size=0.05, stages=_REDUCED,
          says=("looks like noise",)),
    _early("aggregate-noise-one-rank", _AGGREGATION, "the receiver", "reduction",
          one(from_on(aggregate.noisy_result_of_its_own)),
          "one rank receives the aggregate with noise of 0.05 of its norm", size=0.05, stages=_REDUCED),
    _early("aggregate-burst", _AGGREGATION, "nobody", "reduction", once(aggregate.noisy_result),
          "noise of ten times its norm is added to the aggregate at one step", size=10.0, stages=_REDUCED,
          says=("looks like noise",)),
    *(_early(f"aggregate-flip-byte-{byte}", _AGGREGATION, "nobody", "reduction",
          once(partial(aggregate.flipped_bit, 8 * byte + 7)),
          f"the top bit of byte {byte} of the first bucket's largest element flips at one step, on all ranks alike",
          stages=_REDUCED, dtypes=("fp32", "bf16") if byte < 2 else ("fp32",), says=("single element",))
      for byte in range(4)),
    _early("aggregate-flip-lowest-bit", _AGGREGATION, "nobody", "reduction", once(_lowest_bit),
          "the lowest bit of the same element, on all ranks alike: below rounding, and said to be", stages=_REDUCED,
          says=("single element",)),
    _early("aggregate-flip-one-rank", _AGGREGATION, "the odd rank", "reduction", one(once(_lowest_bit)),
          "the lowest bit of one element differs on one rank at one step: bits are compared", stages=(0,),
           not_applicable=_OF_ONE_OWNER),
    _early("gradients-not-cleared", _AGGREGATION, "nobody", "reduction", aggregate.gradients_not_cleared,
          "zero_grad does nothing: the gradients of the step before are in the sum", stages=(0,),
          says=("not cleared",)),
    _early("partition-not-cleared", _AGGREGATION, "nobody", "reduction", aggregate.partition_not_cleared,
          "the aggregate of the step before stays in the partition and is added", stages=(1, 2), says=("not cleared",),
           not_applicable={"ddp": _WHOLE, "megatron-0": _WHOLE}),
)

_UPDATE = (
    _early("applied-factor-4", _AGGREGATION, "nobody", "update", from_on(update.wrong_factor),
          "the optimizer gets four times the aggregate (a wrong loss scale or clip factor)", size=4.0, stages=_REDUCED,
          says=("applied 4 times",), not_applicable=_ALIKE),
    _early("applied-factor-4-one-rank", _AGGREGATION, "the rank", "update", one(from_on(update.wrong_factor)),
          "the same on one rank", size=4.0, stages=_REDUCED, says=("applied 4 times",)),
    _early("applied-noise", _AGGREGATION, "the rank", "update", one(from_on(update.noisy_gradient_of_its_own)),
          "noise of 0.05 of its norm between one rank's reduction and its optimizer", size=0.05, stages=_REDUCED,
          says=("no multiple",),
           not_applicable={"fsdp2": f"{_THE_SCRIPTS}, and no other rank has the same piece to compare it with"},
           # what the script has changed is no multiple of the aggregate: its bits are compared with those of the others
           expected_overrides={"ddp": {"says": ("received something else",)}}),
    _early("parameter-trained-late", ("unreduced-gradient", "update-mismatch"), "nobody", "hyper-parameter",
          once(inputs.unfrozen), "a frozen parameter begins to be trained, which neither wrapper nor optimizer knows",
          says=("rescale.shift",), not_applicable={"megatron-0": _MASTERS, "megatron-1": _MASTERS}),
    _early("update-skipped", _AGGREGATION, "the rank", "update", one(once(update.skipped)),
          "one rank's optimizer does nothing at one step", stages=_REDUCED, says=("did not step",)),
)

_REPLICAS = (
    _early("weight-changed", _DRIFT, "the odd rank", "replica", one(once(update.weight_bit)),
          "one bit of one weight of one rank changes after an update", stages=(0,),
          says=("of step {step}", "embedding.weight"), not_applicable=_OF_ONE_OWNER),
    _early("frozen-parameter-changed", _DRIFT, "the odd rank", "replica",
          one(once(partial(update.in_memory, update.frozen_bit))),
          "one bit of one rank's frozen parameter changes", stages=_REDUCED, says=("of step {step}", "rescale.shift"),
           not_applicable=_IN_SHARDS),
    _early("buffer-changed", _DRIFT, "the odd rank", "replica", one(once(partial(update.in_memory, update.buffer_bit))),
          "one bit of one rank's buffer changes", stages=_REDUCED, says=("buffer rescale.gain",),
           not_applicable={"fsdp2": "FSDP2 keeps no buffers alike: each rank's are its own"},
           wrapper_options={"ddp": {"broadcast_buffers": False}}),  # else the next forward heals it, with rank 0's
    _early("optimizer-state-changed", _DRIFT, "the odd rank", "replica",
          one(once(partial(update.in_memory, update.halved_moment))),
          "one rank's running mean of one gradient element changes", stages=(0,), says=("optimizer exp_avg",),
           not_applicable=_OF_ONE_OWNER),
    _early("gathered-weights-stale", _DRIFT, "the odd rank", "replica", one(from_on(update.stale_weights)),
          "one rank keeps the old weights where it should receive another's update", stages=(1, 2),
          says=("of step {step}",), not_applicable=_NOT_GATHERED),
    _early("gathered-weights-bit", _DRIFT, "the odd rank", "replica", one(from_on(update.corrupted_weights)),
          "one bit of what one rank receives of the updated weights is wrong", stages=(1, 2),
          says=("of step {step}",), not_applicable=_NOT_GATHERED),
)
# fmt: on

_ALL = (*_DATA, *_BEFORE, *_GRADIENTS, *_CONDUCT, *_INPUT, *_REDUCTION, *_UPDATE, *_REPLICAS, *ANSWERED)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}
