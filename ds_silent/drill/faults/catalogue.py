"""List what the drill injects: faults of data, seeds, weights, hyper-parameters, gradients, reductions and replicas.

    fault = FAULTS["gradient-scaled-1.5"]
    injection = fault.inject(target, 2)             # what changes on rank 2; NOTHING where nothing does

A line of the tables says what goes wrong (:mod:`inputs`, :mod:`behind`), when and on whom
(:mod:`injection`), what must come of it (:mod:`fault`), and in which framework it is otherwise. The last faults are
answered: their trainings have a response switched on, and must come out repaired. What the rows of a group have in
common is said once above the tables.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

from ds_silent.drill.faults import behind, inputs
from ds_silent.drill.faults.fault import DYNAMIC, EARLY, MAJORITY, MEAN, ORDERED_RETRY, PERIODIC, RETRY, Fault
from ds_silent.drill.faults.injection import attempts, both, from_on, once, one
from ds_silent.drill.faults.promises import FORMULA_FAULTS, PROMISE_FAULTS
from ds_silent.records import EventKind

_OUTLIER: tuple[EventKind, ...] = ("outlier-rank",)
_CONFIG: tuple[EventKind, ...] = ("config-mismatch",)
_AGGREGATION: tuple[EventKind, ...] = ("aggregation-error",)
_UNREDUCED: tuple[EventKind, ...] = ("unreduced-gradient",)
_DRIFT: tuple[EventKind, ...] = ("replica-drift",)
_REDUCED = (0, 1, 2)  # where the drill reaches into the reduction

_missing = partial(behind.weighted_contribution, 0.0)
_lowest_bit = partial(behind.flipped_bit, 0)
_damaged_once = both(once(behind.skipped), from_on(partial(behind.damaged_repair, 1)))
_damaged_always = both(once(behind.skipped), from_on(partial(behind.damaged_repair, None)))

# -- what the rows of a group have in common ---------------------------------------------------------------------------

_duplicate = partial(Fault, who="all ranks", kinds=("duplicate-data",), strikes="data")
_order = partial(Fault, who="all ranks", kinds=("data-order-mismatch", "low-coverage"), strikes="data")
_non_finite = partial(Fault, who="the rank", kinds=("non-finite",), strikes="gradient")
# found before the training, by comparing the ranks
_before = partial(Fault, first_step=0, who="the odd rank", kinds=_CONFIG, strikes="hyper-parameter")
_environment = partial(_before, strikes="environment")
_seed = partial(_before, kinds=("seed-mismatch",), strikes="seed")
# under ZeRO-3 each number has one owner: no two ranks could disagree
_initial = partial(_before, kinds=("initial-weights-mismatch",), strikes="weights", stages=(0, 1, 2))
# found by a sequential test, which has to see some steps first
_outlier = partial(Fault, who="the odd rank", kinds=_OUTLIER, strikes="gradient", deterministic=False)
_objective = partial(Fault, who="the odd rank", kinds=("objective-mismatch",), strikes="loss")
_set = partial(Fault, who="the odd rank", kinds=_CONFIG, strikes="hyper-parameter")
_aggregated = partial(Fault, first_step=EARLY, who="nobody", kinds=_AGGREGATION, strikes="reduction", stages=_REDUCED)
_applied = partial(_aggregated, who="the rank", strikes="update")
_drifted = partial(Fault, first_step=EARLY, who="the odd rank", kinds=_DRIFT, strikes="replica")
_retry = partial(_aggregated, steps=2, stages=(0, 1), response=RETRY, repair_says=("repeated once",))
_averaged = partial(_drifted, steps=4, stages=(0,), repair_says=("all replicas are equal again",))
_majority = partial(_averaged, steps=2, response=MAJORITY, repair_says=("step {step}", "all replicas are equal again"))

# -- where a fault means nothing, and what is said of it instead -------------------------------------------------------

Reasons = dict[str, str]
_OWNED = "each number has one owner: nobody else holds it, so nobody could differ"
_IN_SHARDS: Reasons = {"fsdp2": _OWNED}
_OF_ONE_OWNER: Reasons = {"fsdp2": _OWNED, "megatron-1": _OWNED}
_CLIPPED = "the script clips by itself: there is no configuration to read it from"
_NO_CONFIG: Reasons = dict.fromkeys(("ddp", "fsdp2"), _CLIPPED)
_THE_SCRIPTS = "between the reduction and the step a gradient is the script's to change"
_ALIKE: Reasons = dict.fromkeys(("ddp", "fsdp2"), f"{_THE_SCRIPTS}, on all ranks alike")
_WAITS: Reasons = {"fsdp2": "the ranks' reductions then differ, and FSDP2 itself waits for ever or dies"}
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
    _duplicate("same-batch-everywhere", from_on(inputs.same_rows),
          "every rank gets the first rank's rows (a sampler that nobody told of the ranks)"),
    _duplicate("same-batch-everywhere-without-ids", from_on(inputs.same_rows),
          "the same, and the script does not tell which rows it takes", ids=False),
    _duplicate("same-batch-pair", one(from_on(inputs.neighbours_rows)), "one rank gets its neighbour's rows",
          who="the pair"),
    _duplicate("same-batch-pair-without-ids", one(from_on(inputs.neighbours_rows)),
          "the same, and the script does not tell which rows it takes", who="the pair", ids=False),
    _duplicate("same-content-other-ids", one(from_on(inputs.neighbours_content)),
          "one rank computes on its neighbour's rows under ids of its own: only the gradients can tell",
          who="the pair"),
    _order("repeated-batch", one(from_on(inputs.repeated_rows)),
          "one rank's loader is stuck: the same rows again and again", who="the rank", deterministic=False, steps=12),
    _order("pass-begun-anew", from_on(inputs.pass_begun_anew),
          "every rank begins the epoch's rows anew in the middle of it, as after a resume that forgets its place"),
    _order("order-of-every-epoch", from_on(inputs.first_epoch_again),
          "every epoch has the order of the first, as of a sampler that nobody tells the epoch", kinds=("same-order",),
          first_step=17, deterministic=False, steps=40),
    _order("epoch-ends-too-early", from_on(inputs.last_rows_again),
          "at the end of each epoch the rows before it come again instead of its last ones",
          deterministic=False, steps=40),
    _order("sampler-seed-one-rank", one(inputs.other_seed),
          "one rank shuffles with another seed under a sharded sampler", who="the rank or all", first_step=1,
          deterministic=False, steps=40),
    _order("sampler-seed-every-rank", inputs.seed_of_its_own,
          "every rank shuffles with a seed of its own: a third of the rows is never seen", first_step=1,
          deterministic=False, steps=40),
    _duplicate("sampler-world-size-one", inputs.sampler_alone, "every rank's sampler believes to be alone",
          first_step=1),
    _duplicate("sampler-world-size-twice", inputs.sampler_twice,
          "the sampler counts twice the ranks: half of the rows is never seen",
          kinds=("low-coverage", "data-order-mismatch"), first_step=1, deterministic=False, steps=40),
    _duplicate("no-labels", one(from_on(inputs.no_labels)),
          "no token of one rank's rows has a label: NaN loss, no gradient", kinds=("non-finite", "zero-gradient"),
          who="the rank"),
    _duplicate("labels-of-own-place", one(from_on(inputs.labels_of_own_place)),
          "one rank's labels are shifted by one place: each is the input that the model reads there",
          kinds=("objective-mismatch",), who="the odd rank", deterministic=False, steps=40),
    _duplicate("label-noise", one(from_on(inputs.label_noise)), "one rank's labels are random", kinds=_OUTLIER,
          who="the odd rank", deterministic=False, steps=100),
    _duplicate("other-distribution", one(from_on(inputs.other_distribution)),
          "one rank's rows are random tokens, another data set than that of the others", kinds=_OUTLIER,
          who="the odd rank", deterministic=False, steps=100),
)

_BEFORE = (
    _seed("torch-seed", one(inputs.torch_seed), "one rank's torch generator has another state"),
    _seed("numpy-seed", one(inputs.numpy_seed), "one rank's numpy generator has another state"),
    _seed("python-seed", one(inputs.python_seed), "one rank's random module has another state"),
    _initial("initial-weights-tensor", one(inputs.other_tensor), "one tensor of one rank has other values",
          not_applicable=_IN_SHARDS),
    _initial("initial-weights-bit", one(inputs.other_bit), "one bit of one weight of one rank differs",
          not_applicable=_IN_SHARDS),
    _before("learning-rate", one(partial(inputs.hyper_parameter, "lr", operator.mul)),
          "one rank's learning rate is twice that of the others", size=2.0),
    _before("weight-decay", one(partial(inputs.hyper_parameter, "weight_decay", operator.add)),
          "one rank's weight decay is 0.05 more", size=0.05),
    _before("config-value", one(inputs.config_value), "one rank's ds_config clips gradients at another norm", size=0.3,
          not_applicable=_NO_CONFIG),
    _environment("environment-cublas", one(partial(inputs.environment, "CUBLAS_WORKSPACE_CONFIG", ":16:8")),
          "CUBLAS_WORKSPACE_CONFIG differs"),
    _environment("environment-omp", one(partial(inputs.environment, "OMP_NUM_THREADS", "3")),
          "OMP_NUM_THREADS differs on one rank"),
    _environment("environment-nccl", one(partial(inputs.environment, "NCCL_ALGO", "Tree")),
          "NCCL_ALGO differs on one rank"),
    _before("dropout-p", one(inputs.dropout_probability), "one rank's dropout has p = 0 from the start", size=0.0),
    # a wrapper's flat copies of the parameters are one piece
    _before("optimizer-without-layer", one(inputs.optimizer_without_layer),
          "one rank's optimizer does not hold the last layer", stages=(0,), dtypes=("fp32",),
          not_applicable={"megatron-1": "the optimizer holds a rank's own shards, which have no name"}),
)

_GRADIENTS = (
    _objective("nan-loss", one(from_on(inputs.nan_loss)), "one rank's loss is NaN", kinds=("non-finite",),
          who="the rank"),
    _non_finite("inf-gradient", one(once(inputs.infinite_element)),
          "one element of one parameter's gradient is infinite at one step"),
    _non_finite("bit-flip", one(once(inputs.flipped_element)),
          "the top exponent bit of one gradient element flips at one step (silent data corruption)",
          kinds=("non-finite", "outlier-rank")),
    _non_finite("zero-gradient", one(from_on(inputs.zero_gradient)),
          "one rank's loss is fine and its gradient is zero (a detached graph)", kinds=("zero-gradient",)),
    *(_outlier(f"gradient-scaled-{size:g}", one(from_on(inputs.scaled_gradient)),
            f"one rank's gradient is {size:g} times too large", size=size, steps=steps)
      for size, steps in ((1.1, 300), (1.5, 100), (1000.0, 60))),
    _outlier("gradient-scaled-0.045", one(from_on(inputs.scaled_gradient)),
          "one rank's gradient is 22 times too small", size=1 / 22, steps=60),
    _outlier("gradient-clipped", one(from_on(inputs.clipped_gradient)),
          "one rank clips each parameter's gradient before the reduction", size=0.005, says=("clips before",),
          steps=60),
    _outlier("gradient-negated", one(from_on(inputs.scaled_gradient)), "one rank climbs instead of descending",
          size=-1.0, steps=300),
    _outlier("gradient-noise-1.0", one(from_on(inputs.noisy_gradient)),
          "noise as large as the gradient is added on one rank", steps=100),
    _outlier("gradient-noise-0.5", one(from_on(inputs.noisy_gradient)),
          "noise half as large as the gradient is added on one rank", size=0.5, steps=300),
    _outlier("stuck-gradient", one(inputs.stuck_gradient),
          "one rank sends the gradient of an earlier step again and again (a stale buffer)", steps=300),
    _outlier("frozen-layers", one(from_on(inputs.frozen_layers)),
          "all layers get a zero gradient on one rank, which trains the embeddings only",
          kinds=("outlier-rank", "zero-gradient"), steps=300),
    # in the other stages the ranks' buckets then differ in size, and DeepSpeed's own reduction dies
    # Megatron ends where a bucket waits for a gradient that is none: so it reduces behind the backward
    _non_finite("layer-without-gradient", one(once(inputs.detached_layer)),
          "the last layer takes no part in one rank's backward", kinds=("zero-gradient", "outlier-rank"),
          who="the odd rank", stages=(0,), not_applicable=_WAITS,
          expected_overrides={"megatron-0": _ZEROS, "megatron-1": _ZEROS},
          wrapper_options={"ddp": {"find_unused_parameters": True}, "megatron": {"overlap_grad_reduce": False}}),
    _outlier("task-out-of-phase", inputs.out_of_phase,
          "of two tasks in turn, one with a hundred times the loss, one rank has the other one", strikes="loss",
          size=100.0, says=("out of phase",), steps=60),
    _objective("loss-scaled", one(from_on(inputs.scaled_loss)), "one rank forgets to divide its loss by four",
          size=4.0, says=("MulBackward0 x 4",)),
    _objective("loss-quartered", one(from_on(inputs.scaled_loss)), "one rank divides its loss by four once more",
          size=0.25, says=("MulBackward0 x 0.25",)),
    _objective("loss-multiplied", one(from_on(inputs.scaled_loss)),
          "one rank multiplies its loss by the number of its label tokens", size=193.0, says=("MulBackward0 x 193",)),
    _objective("loss-summed", one(once(partial(inputs.other_loss, "reduction", "sum"))),
          "one rank sums its loss over its label tokens instead of averaging it", says=("NllLossBackward0 (sum)",)),
    _objective("class-weights", one(once(inputs.class_weights)),
          "one rank's loss weighs half of the classes ten times", size=10.0, says=("(mean, class weights)",)),
    _objective("label-smoothing", one(once(partial(inputs.other_loss, "label_smoothing", 0.1))),
          "one rank smooths its labels", size=0.1, says=("MulBackward1 x 0.9",)),
    _objective("temperature", one(once(inputs.temperature)), "one rank divides its logits by a temperature",
          size=1.5, says=("x 0.666667",), steps=40, deterministic=False),  # it must have stayed
    *(_outlier(f"layer-scaled-{size:g}", one(from_on(inputs.scaled_layer)),
            f"one rank's gradient of one block is {size:g} times what it should be", size=size, says=("layers.3",),
            steps=steps)
      for size, steps in ((1.5, 200), (2.0, 100), (0.5, 100), (-1.0, 300), (0.0, 60))),
    _objective("eval-mode", one(once(inputs.eval_mode)), "one rank trains without dropout (model.eval() was left on)",
          kinds=_CONFIG, says=("in evaluation mode",)),
    _objective("dropout-off", one(once(inputs.dropout_off)),
          "one rank's dropout layers are in evaluation mode, its model is not", kinds=_CONFIG,
          says=("in evaluation mode",)),
    _set("dropout-p-later", one(once(inputs.dropout_probability_later)),
          "one rank's dropout becomes p = 0 in mid-training", size=0.0, says=("settings of", "p 0.0 on rank {rank}")),
    # under ZeRO-2 gradients come in another order then, and buckets of different sizes end DeepSpeed's own reduction
    _set("autocast", one(once(inputs.autocast)), "one rank's forward enters autocast in mid-training",
          stages=(0, 1, 3), says=("bfloat16 on rank {rank}",)),
    _set("learning-rate-later", one(once(partial(inputs.hyper_parameter_later, "lr", operator.mul))),
          "one rank's learning rate becomes three times that of the others in mid-training", size=3.0,
          says=("learning rate",)),
    _set("weight-decay-later", one(once(partial(inputs.hyper_parameter_later, "weight_decay", operator.add))),
          "one rank's weight decay grows by 0.05 in mid-training", size=0.05, says=("weight decay",)),
    _set("betas-later", one(once(partial(inputs.hyper_parameter_later, "betas", lambda betas, new: (new, *betas[1:])))),
          "one rank's first beta becomes 0.5 in mid-training", size=0.5, says=("betas",)),
    # in stage 0 DeepSpeed reduces what requires a gradient, and buckets of different sizes end its own reduction
    _set("frozen-trained", one(once(inputs.unfrozen)), "one rank trains a parameter that is frozen on the others",
          stages=(1, 2), says=("trainable flags",), not_applicable=_WAITS),
)

_REDUCTION = (
    _aggregated("contribution-missing", one(from_on(_missing)), "one rank sends zeros into the reduction",
          who="the rank", says=("rank {rank} 0.00 times",)),
    _aggregated("contribution-doubled", one(from_on(partial(behind.weighted_contribution, 2.0))),
          "one rank's gradient is counted twice", who="the rank", says=("rank {rank} 2.00 times",)),
    _aggregated("micro-batch-missing", one(from_on(behind.missing_micro_batch)),
          "one rank's last micro-batch never reaches the aggregate", who="the rank", accumulation=2),
    _aggregated("micro-batch-missing-everywhere", from_on(behind.missing_micro_batch),
          "the last micro-batch of all ranks never reaches the aggregate", accumulation=2),
    # each rank keeps its own gradient of its own rows: no sum of whole gradients tells it from a lost part
    _aggregated("bucket-dropped", from_on(behind.dropped_bucket),
          "the reduction of the first bucket is never called", kinds=_UNREDUCED, who="an owner", says=("not reduced",),
          expected_overrides={"fsdp2": {"kinds": _AGGREGATION, "who": "nobody", "says": ("layers.3",)},
                              "megatron-1": {**_PARTS, "says": ("layers.3",)}}),
    _aggregated("parameter-unreduced", from_on(behind.unreduced_parameter),
          "one parameter takes no part in the reduction", kinds=_UNREDUCED, who="an owner",
          says=("not reduced", "position"),
          not_applicable={"fsdp2": "a parameter that takes no part in the reduction is refused "
                                   "as the observer is attached"},
          expected_overrides={"megatron-1": {**_PARTS, "says": ("position",)}}),
    # a half of two or three ranks may be one rank alone
    # of four ranks: layers in the first half's parts lack the second
    _aggregated("wrong-group", from_on(behind.wrong_group), "the ranks' two halves reduce among themselves",
          kinds=("aggregation-error", "unreduced-gradient"),
          expected_overrides={"megatron-1": {"who": "the pair or nobody"}}),
    _aggregated("division-forgotten", from_on(behind.forgotten_division),
          "the sum is not divided by the number of ranks", says=("{ranks} times the mean", "all 7 layers")),
    _aggregated("bucket-stale", behind.stale_bucket,
          "the first bucket's result is that of the step before, for good", says=("that of the step before",)),
    _aggregated("bucket-tail-zeroed", from_on(behind.zeroed_tail),
          "the last quarter of the first bucket comes back as zeros", size=0.25),
    _aggregated("aggregate-noise", from_on(behind.noisy_result),
          "noise of 0.05 of its norm is added to the aggregate, the same on all ranks", size=0.05,
          says=("looks like noise",)),
    _aggregated("aggregate-noise-one-rank", one(from_on(behind.noisy_result_of_its_own)),
          "one rank receives the aggregate with noise of 0.05 of its norm", who="the receiver", size=0.05),
    _aggregated("aggregate-burst", once(behind.noisy_result),
          "noise of ten times its norm is added to the aggregate at one step", size=10.0, says=("looks like noise",)),
    *(_aggregated(f"aggregate-flip-byte-{byte}", once(partial(behind.flipped_bit, 8 * byte + 7)),
            f"the top bit of byte {byte} of the first bucket's largest element flips at one step, on all ranks alike",
            dtypes=("fp32", "bf16") if byte < 2 else ("fp32",), says=("single element",))
      for byte in range(4)),
    _aggregated("aggregate-flip-lowest-bit", once(_lowest_bit),
          "the lowest bit of the same element, on all ranks alike: below rounding, and said to be",
          says=("single element",)),
    _aggregated("aggregate-flip-one-rank", one(once(_lowest_bit)),
          "the lowest bit of one element differs on one rank at one step: bits are compared", who="the odd rank",
          stages=(0,), not_applicable=_OF_ONE_OWNER),
    _aggregated("gradients-not-cleared", behind.gradients_not_cleared,
          "zero_grad does nothing: the gradients of the step before are in the sum", stages=(0,),
          says=("not cleared",)),
    _aggregated("gradients-not-cleared-one-rank", one(behind.gradients_not_cleared),
          "the same on one rank", who="the rank", stages=(0,), says=("not cleared",)),
    _aggregated("partition-not-cleared", behind.partition_not_cleared,
          "the aggregate of the step before stays in the partition and is added", stages=(1, 2), says=("not cleared",),
          not_applicable=dict.fromkeys(("ddp", "megatron-0"), "every rank has the whole gradient, none a part of it")),
)

_UPDATE = (
    _applied("applied-factor-4", from_on(behind.wrong_factor),
          "the optimizer gets four times the aggregate (a wrong loss scale or clip factor)", who="nobody", size=4.0,
          says=("applied 4 times",), not_applicable=_ALIKE),
    _applied("applied-factor-4-one-rank", one(from_on(behind.wrong_factor)), "the same on one rank", size=4.0,
          says=("applied 4 times",)),
    # what the script has changed is no multiple of the aggregate: its bits are compared with those of the others
    _applied("applied-noise", one(from_on(behind.noisy_gradient_of_its_own)),
          "noise of 0.05 of its norm between one rank's reduction and its optimizer", size=0.05, says=("no multiple",),
          not_applicable={"fsdp2": f"{_THE_SCRIPTS}, and no other rank has the same piece to compare it with"},
          expected_overrides={"ddp": {"says": ("received something else",)}}),
    _set("parameter-trained-late", once(inputs.unfrozen),
          "a frozen parameter begins to be trained, which neither wrapper nor optimizer knows",
          kinds=("unreduced-gradient", "update-mismatch"), who="nobody", says=("rescale.shift",),
          not_applicable={"megatron-0": _MASTERS, "megatron-1": _MASTERS}, first_step=EARLY),
    _applied("update-skipped", one(once(behind.skipped)), "one rank's optimizer does nothing at one step",
          says=("did not step",)),
    _drifted("weight-changed", one(once(behind.weight_bit)),
          "one bit of one weight of one rank changes after an update", stages=(0,),
          says=("of step {step}", "embedding.weight"), not_applicable=_OF_ONE_OWNER),
    _drifted("frozen-parameter-changed", one(once(partial(behind.in_memory, behind.frozen_bit))),
          "one bit of one rank's frozen parameter changes", stages=_REDUCED, says=("of step {step}", "rescale.shift"),
          not_applicable=_IN_SHARDS),
    # else the next forward heals it, with rank 0's
    _drifted("buffer-changed", one(once(partial(behind.in_memory, behind.buffer_bit))),
          "one bit of one rank's buffer changes", stages=_REDUCED, says=("buffer rescale.gain",),
          not_applicable={"fsdp2": "FSDP2 keeps no buffers alike: each rank's are its own"},
          wrapper_options={"ddp": {"broadcast_buffers": False}}),
    _drifted("optimizer-state-changed", one(once(partial(behind.in_memory, behind.halved_moment))),
          "one rank's running mean of one gradient element changes", stages=(0,), says=("optimizer exp_avg",),
          comparisons=2, not_applicable=_OF_ONE_OWNER),  # states alone may differ by design; then the weights part
    _drifted("gathered-weights-stale", one(from_on(behind.stale_weights)),
          "one rank keeps the old weights where it should receive another's update", stages=(1, 2),
          says=("of step {step}",), not_applicable=_NOT_GATHERED),
    _drifted("gathered-weights-bit", one(from_on(behind.corrupted_weights)),
          "one bit of what one rank receives of the updated weights is wrong", stages=(1, 2), says=("of step {step}",),
          not_applicable=_NOT_GATHERED),
)
_GAVE_UP = ("could not be made equal", "tried 3 times")
_SKIPPED, _NOISY = "one rank's optimizer does nothing at one step", "one rank applies a noisy gradient at one step"

_ANSWERED = (
    _retry("retry-burst", once(behind.noisy_result),
          "noise of ten times its norm is added to the aggregate at one step", size=10.0, says=("looks like noise",)),
    _retry("retry-flips-one-rank", one(once(behind.flipped_bits)),
          "one rank receives the aggregate of one step with flipped bits", who="the receiver"),
    _retry("retry-contribution-missing", one(once(_missing)), "one rank sends zeros into one step's reduction",
          who="the rank", says=("rank {rank} 0.00 times",)),
    _retry("retry-bucket-dropped", once(behind.dropped_bucket),
          "the reduction of one step's first bucket is never called", kinds=("unreduced-gradient",), who="an owner",
          says=("not reduced",)),
    _retry("retry-burst-twice", once(attempts(behind.noisy_result, 2)),
          "the same burst, and the first repetition is hit too", size=10.0, repair_says=("repeated twice",)),
    _retry("retry-burst-always", from_on(attempts(behind.noisy_result)),
          "the same burst in every attempt of every step: cannot be repaired", size=10.0, repaired=False,
          repair_says=("repeated 3 times", "stayed wrong")),
    _retry("ordered-pieces-damaged", one(once(behind.damaged_pieces)),
          "what one rank adds up in an ordered reduction arrives damaged", response=ORDERED_RETRY),
    _majority("majority-update-skipped", one(once(behind.skipped)), _SKIPPED),
    _majority("majority-weight-changed", one(once(behind.weight_bit)), "one bit of one weight of one rank changes",
          says=("of step {step}", "embedding.weight")),
    _majority("majority-frozen-changed", one(once(partial(behind.in_update, behind.frozen_bit))),
          "one bit of one rank's frozen parameter changes", says=("rescale.shift",)),
    _majority("majority-buffer-changed", one(once(partial(behind.in_update, behind.buffer_bit))),
          "one bit of one rank's buffer changes", says=("buffer rescale.gain",)),
    _majority("majority-optimizer-changed", one(once(partial(behind.in_update, behind.moment_bit))),
          "one bit of one rank's running mean changes", says=("optimizer exp_avg",)),
    _majority("majority-signs-received", one(from_on(behind.wrong_signs)),
          "one rank receives every aggregate with some wrong signs: it drifts and is repaired at every step",
          kinds=(*_DRIFT, *_AGGREGATION), again=True, repair_says=("all replicas are equal again",)),
    _majority("majority-two-ranks", once(behind.bits_of_two),
          "two ranks are damaged in different tensors: each tensor has a majority of its own",
          who="the pair or nobody"),
    _majority("majority-tie", once(behind.no_majority),
          "half of the ranks skip an update: nobody can say who is right", who="nobody", repaired=False,
          repair_says=("no version of", "more than half of the ranks")),
    _majority("majority-copy-damaged", one(_damaged_once),
          "a skipped update, and the healthy bits arrive damaged the first time"),
    _majority("majority-copy-always-damaged", one(_damaged_always),
          "a skipped update, and the healthy bits never arrive intact", repaired=False, repair_says=_GAVE_UP),
    *(_averaged(f"{response.name}-{name}", make, description, response=response, size=0.05)
      for response in (MEAN, PERIODIC, DYNAMIC)
      for name, make, description in (("update-skipped", one(once(behind.skipped)), _SKIPPED),
                                      ("update-noisy", one(once(behind.noisy_gradient)), _NOISY))),
    _averaged("mean-average-damaged", one(_damaged_once),
          "a skipped update, and the average arrives damaged the first time", response=MEAN),
    _averaged("mean-average-always-damaged", one(_damaged_always),
          "a skipped update, and the average never arrives intact", response=MEAN, repaired=False,
          repair_says=_GAVE_UP),
    _averaged("dynamic-average-damaged", one(_damaged_once),
          "a skipped update, and the overlapped average arrives damaged the first time", response=DYNAMIC),
)
# fmt: on

_ALL = (*_DATA, *_BEFORE, *_GRADIENTS, *_REDUCTION, *_UPDATE, *FORMULA_FAULTS, *PROMISE_FAULTS, *_ANSWERED)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}
