"""Faults that are answered: their trainings have a response switched on, and must come out repaired.

    MEAN.compared(4), MEAN.settled(4)     # 6, 6: when a fault of step 4 is seen, and when it is repaired

The healthy training with the same response is the reference: it must be silent, and bit for bit what it is without.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ds_silent.drill.faults import aggregate, update
from ds_silent.drill.faults.fault import EARLY, Fault, Response
from ds_silent.drill.faults.injection import attempts, both, from_on, once, one
from ds_silent.records import EventKind

REPLICAS_COMPARED = 3  # optimizer steps between two averagings, so that a drift lasts before it is found


def _drift(method: str, interval: int) -> dict[str, Any]:
    return {"respond": {"on_replica_drift": method}, "integrity": {"replica_interval": interval}}


def _resync(mode: str) -> dict[str, Any]:
    return {"resync": {"mode": mode, "interval": REPLICAS_COMPARED}, "integrity": {"replica_interval": 0}}


_ON_ERROR = {"respond": {"on_aggregation_error": "retry"}}
_ORDERED = {"reduction": "ordered"}

RETRY = Response("retry", _ON_ERROR)
MAJORITY = Response("majority", _drift("majority", 1), least_ranks=3, names_ranks=True)
MEAN = Response("mean", _drift("mean", REPLICAS_COMPARED), REPLICAS_COMPARED, exact=False)
PERIODIC = Response("periodic", _resync("periodic"), REPLICAS_COMPARED, exact=False)
DYNAMIC = Response("dynamic", _resync("dynamic"), REPLICAS_COMPARED, first=1, delay=1, exact=False)
ORDERED = Response("ordered", _ORDERED, reference="healthy-ordered")  # its order of addition gives bits of its own
ORDERED_RETRY = Response("ordered-retry", {**_ON_ERROR, **_ORDERED}, reference="healthy-ordered")

_AGGREGATION: tuple[EventKind, ...] = ("aggregation-error",)
_DRIFT: tuple[EventKind, ...] = ("replica-drift",)
_missing = partial(aggregate.weighted_contribution, 0.0)
_damaged_once = both(once(update.skipped), from_on(partial(update.damaged_repair, 1)))
_damaged_always = both(once(update.skipped), from_on(partial(update.damaged_repair, None)))

# A table reads better than what a formatter makes of it.
# fmt: off
_retry = partial(Fault, first_step=EARLY, steps=2, stages=(0, 1), response=RETRY, repair_says=("repeated once",))
_majority = partial(Fault, first_step=EARLY, steps=2, stages=(0,), response=MAJORITY,
                    repair_says=("step {step}", "all replicas are equal again"))
_averaged = partial(Fault, first_step=EARLY, steps=4, stages=(0,), repair_says=("all replicas are equal again",))
_GAVE_UP = ("could not be made equal", "tried 3 times")
_SKIPPED, _NOISY = "one rank's optimizer does nothing at one step", "one rank applies a noisy gradient at one step"

ANSWERED = (
    _retry("retry-burst", _AGGREGATION, "nobody", "reduction", once(aggregate.noisy_result),
          "noise of ten times its norm is added to the aggregate at one step", size=10.0, says=("looks like noise",)),
    _retry("retry-flips-one-rank", _AGGREGATION, "the receiver", "reduction", one(once(aggregate.flipped_bits)),
          "one rank receives the aggregate of one step with flipped bits"),
    _retry("retry-contribution-missing", _AGGREGATION, "the rank", "reduction", one(once(_missing)),
          "one rank sends zeros into one step's reduction", says=("rank {rank} 0.00 times",)),
    _retry("retry-bucket-dropped", ("unreduced-gradient",), "an owner", "reduction", once(aggregate.dropped_bucket),
          "the reduction of one step's first bucket is never called", says=("not reduced",)),
    _retry("retry-burst-twice", _AGGREGATION, "nobody", "reduction", once(attempts(aggregate.noisy_result, 2)),
          "the same burst, and the first repetition is hit too", size=10.0, repair_says=("repeated twice",)),
    _retry("retry-burst-always", _AGGREGATION, "nobody", "reduction", from_on(attempts(aggregate.noisy_result)),
          "the same burst in every attempt of every step: cannot be repaired", size=10.0, repaired=False,
          repair_says=("repeated 3 times", "stayed wrong")),
    _retry("ordered-pieces-damaged", _AGGREGATION, "nobody", "reduction", one(once(aggregate.damaged_pieces)),
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
          one(from_on(aggregate.wrong_signs)),
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
