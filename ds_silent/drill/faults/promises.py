"""A promise that is broken on every rank alike: of loss, schedule, weights, batch, attention, optimizer.

    PROMISE_FAULTS, FORMULA_FAULTS               # rows of the catalogue
    injection = scheduled(wrong, target, 2)      # the optimizer has a scheduler, which goes wrong at the target's step
    injection = other_formula(twice, target, 2)
    injection.update(optimizer, run, step=4)     # torch's Adam updates the weights in another way inside run()

A batch speaks for itself where a causal language model of transformers takes it, so these faults train
:class:`ds_silent.practice.model.LanguageModel`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

from ds_silent.drill.faults import inputs
from ds_silent.drill.faults.fault import EARLY, LANGUAGE_MODEL, Fault
from ds_silent.drill.faults.injection import Injection, Target, acting, both, changing, from_on
from ds_silent.practice.model import BEGIN, END, IGNORED, LAST_LAYER, Inputs

_MEGATRON = ("megatron-0", "megatron-1")
_MASTERS = "nobody is asked which weights its masters stand for"

# -- the loss ----------------------------------------------------------------------------------------------------------

divided_loss = changing(loss=lambda target, loss, step: loss / target.accumulation)
undivided_loss = changing(loss=lambda target, loss, step: loss / (1.0 / target.accumulation))
divided_by_all = changing(loss=lambda target, loss, step: loss / (target.accumulation * target.ranks))

_objective = partial(
    Fault,
    who="nobody",
    kinds=("objective-mismatch",),
    strikes="loss",
    first_step=EARLY,
    accumulation=2,
    not_applicable=dict.fromkeys(("ddp", "fsdp2", *_MEGATRON), "the script's own loop may divide so"),
)

# -- a schedule of the learning rates ----------------------------------------------------------------------------------

WrongRates = Callable[[list[float], list[float]], list[float]]
DECAYING, FLOOR = partial(ExponentialLR, gamma=0.9), 1e-5


def scheduled(wrong: WrongRates, target: Target, me: int, schedule: Callable[[Any], Any] = DECAYING) -> Injection:
    """A scheduler of torch sets what ``wrong`` makes of the rates before and the right ones, from the step on."""
    schedulers: list[Any] = []

    def make(optimizer: Any) -> None:
        for place, group in enumerate(optimizer.param_groups):
            group["lr"] *= 1.0 + place
        schedulers.append(schedule(optimizer))

    def advance(module: Any, optimizer: Any, step: int) -> None:
        [scheduler] = schedulers
        if step == target.step - 1:
            right = scheduler.get_lr
            scheduler.get_lr = lambda: wrong([group["lr"] for group in optimizer.param_groups], right())
        scheduler.step()

    return Injection(optimizer=make, afterwards=advance)


_rates = partial(Fault, who="nobody", kinds=("update-mismatch",), strikes="hyper-parameter", first_step=EARLY, groups=2)

# -- the optimizer's groups --------------------------------------------------------------------------------------------


@acting("optimizer")
def in_two_groups(target: Target, optimizer: Any) -> None:
    first = optimizer.param_groups[0]
    optimizer.param_groups.append({**first, "params": first["params"][:1]})


undecayed = changing(optimizer=lambda target, optimizer: optimizer.param_groups[-1].update(weight_decay=0.0))
_groups = partial(Fault, who="nobody", kinds=("update-mismatch",), strikes="hyper-parameter", first_step=1)

# -- the weights in use ------------------------------------------------------------------------------------------------


@torch.no_grad()
def _grow(tensors: Iterable[Tensor]) -> None:
    for values in tensors:
        getattr(values, "ds_tensor", values).mul_(1.01)  # under ZeRO-3 the shard


weights_alone = changing(before=lambda target, module, optimizer, step: _grow(p for p in module.parameters()))
masters_alone = changing(
    before=lambda target, module, optimizer, step: _grow(p for g in optimizer.param_groups for p in g["params"])
)


def overwritten(target: Target, me: int) -> Injection:
    """Weights of one layer grow while they are whole, in the forward that has gathered them."""
    now = {"step": 0}

    def hook(module: Any) -> None:
        layer = module.get_submodule(LAST_LAYER)
        for gathers in (layer, layer.up):  # FSDP2's unit, and ZeRO-3's
            gathers.register_forward_pre_hook(
                lambda *given: _grow([layer.up.weight.data]) if now["step"] >= target.step else None
            )

    return Injection(model=hook, before=lambda module, optimizer, step: now.update(step=step))


kept_whole = changing(before=lambda target, module, optimizer, step: module.set_reshard_after_backward(False))
_weights = partial(
    Fault,
    who="nobody",
    kinds=("weights-mismatch",),
    strikes="weights",
    first_step=EARLY,
    dtypes=("bf16",),
    says=("not the rounded fp32 masters",),
    not_applicable={
        **dict.fromkeys(("ddp", "fsdp2"), "the optimizer updates the weights themselves, and not masters"),
        **dict.fromkeys(_MEGATRON, _MASTERS),
    },
)
_gathered = partial(
    _weights,
    dtypes=("fp32", "bf16"),
    says=("not what the shards hold",),
    not_applicable=dict.fromkeys(("ddp", *_MEGATRON), "every rank holds all weights, so none are gathered"),
)

# -- a batch, and the attention ----------------------------------------------------------------------------------------


@acting("before")
def given(change: Callable[[Inputs], Inputs], target: Target, module: Any, optimizer: Any, step: int) -> None:
    """The language model's forward gets what ``change`` makes of a healthy batch."""
    module.given = change


def _columns(inputs: Inputs) -> Tensor:
    ids = inputs["input_ids"]
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def _with(name: str, make: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {**inputs, name: make(inputs)}


no_label = _with("labels", lambda inputs: torch.full_like(inputs["labels"], IGNORED))
shifted_labels = _with("labels", lambda inputs: F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED))
two_begins = _with("input_ids", lambda inputs: inputs["input_ids"].where(_columns(inputs) != 1, BEGIN))
ends_ignored = _with("labels", lambda inputs: inputs["labels"].where(inputs["input_ids"] != END, IGNORED))
padding_trained = _with(
    "labels", lambda inputs: inputs["labels"].where(inputs["attention_mask"] != 0, inputs["input_ids"])
)
packed_under_mask = _with("position_ids", lambda inputs: _columns(inputs) % 8)


def padding_attended(inputs: Inputs) -> Inputs:
    """Rows are padded on the left, and no mask is given."""
    padding = inputs["attention_mask"].eq(0).sum(1, keepdim=True)
    places = (_columns(inputs) - padding) % inputs["input_ids"].shape[1]
    return {name: inputs[name].gather(1, places) for name in ("input_ids", "labels")}


def packed_with_cache(inputs: Inputs) -> Inputs:
    """Without a mask, but with ``use_cache`` transformers does not see the documents in the positions."""
    return {**inputs, "attention_mask": None, "position_ids": _columns(inputs) % 16, "use_cache": True}


def seeing_all(inputs: Inputs) -> Inputs:
    rows, length = inputs["input_ids"].shape
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device=inputs["input_ids"].device)
    return {**inputs, "attention_mask": mask}


def _batch(name: str, change: Callable[[Inputs], Inputs], description: str, says: str, **more: Any) -> Fault:
    return Fault(
        name,
        partial(given, change),
        description,
        "nobody",
        ("batch-suspect",),
        "data",
        deterministic=False,  # some rows are needed
        first_step=1,
        says=(says,),
        healthy=LANGUAGE_MODEL,
        **{"not_applicable": _OWN_MODELS, **more},
    )


_OWN_MODELS = dict.fromkeys(_MEGATRON, "Megatron-core trains models of its own, whose batches promise nothing")
_probed: dict[str, Any] = {
    "stages": (0, 1, 2),
    "not_applicable": {**_OWN_MODELS, "fsdp2": "other ranks take part in each forward, so it is not probed"},
}

# -- an optimizer's formula --------------------------------------------------------------------------------------------

Lists = tuple[list[Any], ...]
Settings = dict[str, Any]
Change = Callable[[Any, Lists, Settings], None]


@acting("update")
def other_formula(change: Change, target: Target, optimizer: Any, run: Callable[[], Any], step: int) -> Any:
    """Call ``change(adam, lists, settings)`` where torch's Adam calls the function that updates the weights."""
    module = importlib.import_module("torch.optim.adam")
    adam = module.adam
    with patch.object(module, "adam", lambda *lists, **settings: change(adam, lists, settings)):
        return run()


def otherwise(**other: Any) -> Change:
    """Go by other settings than the group's; a function makes its own of them."""

    def change(adam: Any, lists: Lists, settings: Settings) -> None:
        adam(*lists, **settings | {name: make(settings) if callable(make) else make for name, make in other.items()})

    return change


def miscounted(wrong: Callable[[Tensor], Tensor], adam: Any, lists: Lists, settings: Settings) -> None:
    """Correct the moments' bias as at another step."""
    *others, steps = lists
    adam(*others, [wrong(step) for step in steps], **settings)
    only_counted(adam, lists, settings)


def twice(adam: Any, lists: Lists, settings: Settings) -> None:
    adam(*lists, **settings)
    adam(*lists, **settings)


def without_first(adam: Any, lists: Lists, settings: Settings) -> None:
    adam(*([*each[1:]] for each in lists), **settings)


def epsilon_inside(adam: Any, lists: Lists, settings: Settings) -> None:
    """Add epsilon below the root: to the second moment, as far as its bias is corrected."""
    *_, seconds, _, steps = lists
    beta2, eps = settings["beta2"], settings["eps"]
    added = [eps * (1.0 - beta2 ** (float(step) + 1.0)) for step in steps]
    for second, more in zip(seconds, added, strict=True):
        second.add_(more / beta2)
    adam(*lists, **{**settings, "eps": 0.0})
    for second, more in zip(seconds, added, strict=True):
        second.sub_(more).clamp_(min=0.0)


def only_counted(adam: Any, lists: Lists, settings: Settings) -> None:
    """Count the step, and leave weights and state as they are."""
    for step in lists[-1]:
        step += 1


def halved_gradient(adam: Any, lists: Lists, settings: Settings) -> None:
    parameters, gradients, *others = lists
    adam(parameters, [0.5 * gradient for gradient in gradients], *others, **settings)


def rounded_weights(adam: Any, lists: Lists, settings: Settings) -> None:
    adam(*lists, **settings)
    for weights in lists[0]:
        weights.copy_(weights.bfloat16())


def without_memory(adam: Any, lists: Lists, settings: Settings) -> None:
    for moment in (*lists[2], *lists[3]):
        moment.zero_()
    adam(*lists, **settings)


_ROUNDED_AWAY = {"ddp": {"dtypes": ("fp32",)}}  # bf16 weights without masters round away what is small
_UNKNOWN = "none of the known mistakes explains it"
# A table reads better than what a formatter makes of it.
# fmt: off
_FORMULAS: tuple[tuple[str, Change, str, str], ...] = (
    ("decay-left-out", otherwise(weight_decay=0.0), "leaves the weight decay out", "no weight decay"),
    ("decay-coupled", otherwise(decoupled_weight_decay=False), "adds the weight decay to the gradient",
     "coupled with the gradient"),
    ("bias-correction-left-out", partial(miscounted, lambda step: torch.full_like(step, 1e6)),
     "corrects no bias of its moments", "no bias correction"),
    ("momentum-left-out", otherwise(beta1=0.0), "keeps no momentum", "beta1 is 0 instead of 0.9"),
    ("second-beta-changed", otherwise(beta2=0.95), "has another second beta", "beta2 is 0.95"),
    ("epsilon-inside-the-root", epsilon_inside, "adds epsilon below the root", "epsilon inside the root"),
    ("state-forgotten", without_memory, "forgets its moments", _UNKNOWN),
    ("sign-turned", otherwise(maximize=True), "climbs", "the sign of the gradient is turned"),
    ("update-only-counted", only_counted, "counts, and does nothing else", "the update was not applied"),
    ("update-applied-twice", twice, "applies each update twice", "applied twice"),
    ("rate-doubled-in-the-step", otherwise(lr=lambda group: 2.0 * group["lr"]),
     "goes by twice the group's rate", "the rate is 2 times"),
    ("epsilon-changed", otherwise(eps=1e-4), "has another epsilon", _UNKNOWN),
    ("decay-doubled", otherwise(weight_decay=0.02), "has twice the weight decay", _UNKNOWN),
    ("decay-without-rate", otherwise(weight_decay=lambda group: group["weight_decay"] / group["lr"]),
     "decays the weights by all of the decay", _UNKNOWN),
    ("gradient-halved-in-the-step", halved_gradient, "goes by half of the gradient", _UNKNOWN),
    ("weights-rounded", rounded_weights, "leaves weights that are rounded to bf16", _UNKNOWN),
    ("step-counted-late", partial(miscounted, lambda step: step - 1), "corrects the bias as at the step before",
     "the bias correction is that of the step before"),
    ("tensor-not-stepped", without_first, "leaves the optimizer's first tensor as it is", "not applied"),
)
PROMISE_FAULTS = (
    _objective("loss-divided-twice", from_on(divided_loss),
          "all ranks divide their loss by the accumulation, as the framework does itself",
          says=("engine.backward divides by the",)),
    _objective("loss-not-divided", from_on(undivided_loss),
          "all ranks take back the framework's division by the accumulation", says=("added up and not divided",)),
    _objective("loss-divided-by-all", from_on(divided_by_all),
          "all ranks divide their loss by the micro-batches of all ranks, as framework and reduction do",
          says=("divided by the {ranks} ranks",)),
    _rates("schedule-stale", partial(scheduled, lambda before, right: before),
          "the schedule counts on, and its rates stay as they are", says=("learning rate of group 0",)),
    _rates("schedule-group-forgotten", partial(scheduled, lambda before, right: [*right[:-1], before[-1]]),
          "the rate of the last group stays as it is", says=("parameter group 1",)),
    _rates("schedule-base-of-other-group", partial(scheduled, lambda before, right: [right[0] for _ in right]),
          "each group's rate is made of the first group's base", says=("is what it gives group 0",)),
    _rates("schedule-factor-of-one-group", partial(scheduled, lambda before, right: [*right[:-1], 0.5 * right[-1]]),
          "the last group's rate gets another factor than the others", says=("parameter group 1",)),
    _rates("schedule-in-half-precision",
          partial(scheduled, lambda before, right: torch.tensor(right).bfloat16().tolist()),
          "the schedule's rates are rounded to bf16", says=("learning rate of group 0",)),
    _rates("schedule-moves-twice", partial(scheduled, lambda before, right: [0.9 * rate for rate in right]),
          "each step of the schedule counts twice", says=("learning rate of group 0",)),
    _rates("schedule-without-floor", partial(scheduled, lambda before, right: [rate - FLOOR for rate in right],
                                             schedule=partial(CosineAnnealingLR, T_max=20, eta_min=FLOOR)),
          "the cosine goes on below its floor", says=("learning rate of group 0", "CosineAnnealingLR")),
    _groups("optimizer-without-layer-everywhere", inputs.optimizer_without_layer,
          "no rank's optimizer holds the last layer", says=("layers.3", "no optimizer holds"), stages=(0,),
          dtypes=("fp32",), not_applicable=dict.fromkeys(_MEGATRON, _MASTERS)),
    _groups("parameter-in-two-groups", in_two_groups, "all optimizers hold a parameter in two groups", stages=(0,),
          says=("applied twice",), deterministic=False),
    _groups("decay-where-none-is-set", both(undecayed, partial(other_formula, otherwise(weight_decay=0.01))),
          "all groups decay, also one that is to have no decay", deterministic=False, groups=2,
          expected_overrides=_ROUNDED_AWAY),
    Fault("frozen-module-differs", inputs.other_teacher,
          "a frozen module beside the model has other weights on one rank", "the odd rank",
          ("weights-mismatch",), "weights", first_step=1, says=("lies outside the observed model",),
          deterministic=False),  # told at the second step in which it is called
    _gathered("gathered-weights-overwritten", overwritten, "the weights of a layer change while they are whole",
          stages=(3,)),
    _gathered("gathered-weights-kept", from_on(kept_whole), "gathered weights stay over an update",
          first_step=2, stages=(), deterministic=False),
    _weights("weights-without-masters", from_on(weights_alone),
          "the bf16 weights of the forward are written, and the masters are not"),
    _weights("masters-without-weights", from_on(masters_alone),
          "the fp32 masters are written, and the forward's weights are not", stages=(0, 1, 2)),
    Fault("evaluation-mode-kept", inputs.kept_in_evaluation, "nobody calls train() behind an evaluation", "nobody",
          ("update-mismatch",), "hyper-parameter", deterministic=False, says=("in evaluation mode since step {step}",),
          not_applicable=dict.fromkeys(_MEGATRON, "the drill's model there has no dropout")),
    _batch("labels-all-ignored", no_label, "no label counts (a template that finds no answer)",
          "Not one label counts", steps=40),
    _batch("labels-shifted-already", shifted_labels, "the labels are shifted, and the model shifts them once more",
          "shifted by one already"),
    _batch("two-begin-tokens", two_begins, "each row begins with two begin tokens", "two tokens that begin a sequence"),
    _batch("ends-not-trained", ends_ignored, "the label of each row's end is ignored", "No row trains its end"),
    _batch("padding-trained", padding_trained, "padding has labels", "Padding is trained"),
    _batch("padding-attended", padding_attended, "rows begin with padding, and no mask is given",
          "Rows begin with padding"),
    _batch("packed-under-a-mask", packed_under_mask, "packed documents, and a mask of ones that hides them",
          "Positions start again inside rows"),
    _batch("later-tokens-attended", seeing_all, "a mask lets each place see the tokens behind it",
          "change with the tokens behind it", **_probed),
    _batch("other-documents-attended", packed_with_cache, "packed documents see each other, through use_cache",
          "the documents are not separate", **_probed),
)
# fmt: on
FORMULA_FAULTS = tuple(
    Fault(
        name,
        from_on(partial(other_formula, change)),
        f"the optimizer's step {what} on all ranks",
        who="nobody",
        kinds=("update-mismatch",),
        strikes="update",
        deterministic=False,  # told at the next step, which reads what this one has left
        first_step=EARLY,
        says=(words,),
        expected_overrides=_ROUNDED_AWAY,
    )
    for name, change, what, words in _FORMULAS
)
