"""Make injections before the reduction: data, seeds, weights, hyper-parameters, loss, a rank's own gradient.

    injection = same_rows(target, 1)          # on rank 1
    injection.rows(1, 7)                      # (0, 7): rank 1 takes what the sampler deals to rank 0 at step 7

Makers as in :mod:`ds_silent.drill.faults.injection`. One that needs a past (the rows or gradients of the step before
the target's) looks at the target's step itself. A gradient function is called in a leaf tensor hook that is registered
before the observer's: torch runs them in that order and hands on what they return, so the observer sees the corrupted
gradient as this rank's own, exactly as if the device had computed it wrongly.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_silent.drill.faults.injection import (
    STEPS_PER_EPOCH,
    Batch,
    Injection,
    Shard,
    Target,
    acting,
    changing,
    flip_bit,
    noise_like,
    top_exponent_bit,
)
from ds_silent.practice.model import IGNORED, LAST_LAYER, VOCABULARY, make_rows

NewValue = Callable[[Any, float], Any]
"""A hyper-parameter from its value and the target's size."""


def _generator(target: Target) -> torch.Generator:
    return torch.Generator().manual_seed(7919 + target.rank)


# -- data ------------------------------------------------------------------------------------------------------------

# of the first rank
same_rows = changing(rows=lambda target, me, step: (0, step))
neighbours_rows = changing(rows=lambda target, me, step: (target.partner, step))
neighbours_content = changing(content=lambda target, me, step: (target.partner, step))
# of the step before the target's, again and again
repeated_rows = changing(rows=lambda target, me, step: (me, target.step - 1))
# the epoch's first rows come again, as after a resume that forgets how far the pass was
pass_begun_anew = changing(rows=lambda target, me, step: (me, step - (target.step - 1) % STEPS_PER_EPOCH))
first_epoch_again = changing(rows=lambda target, me, step: (me, (step - 1) % STEPS_PER_EPOCH + 1))
last_rows_again = changing(rows=lambda target, me, step: (me, step - (step % STEPS_PER_EPOCH == 0)))
# of the sampler
other_seed = changing(shard=lambda target, shard: replace(shard, seed=shard.seed + 1))
seed_of_its_own = changing(shard=lambda target, shard: replace(shard, seed=shard.seed + shard.rank))
sampler_alone = changing(shard=lambda target, shard: Shard(1, 0, shard.seed))
sampler_twice = changing(shard=lambda target, shard: replace(shard, ranks=2 * shard.ranks))
no_labels = changing(batch=lambda target, batch, step: replace(batch, labels=torch.full_like(batch.labels, IGNORED)))
# the model shifts them itself: now each is the input of its own place
labels_of_own_place = changing(batch=lambda target, batch, step: replace(batch, labels=batch.labels.roll(1, 1)))


@acting("batch", memory=_generator)
def label_noise(target: Target, generator: torch.Generator, batch: Batch, step: int) -> Batch:
    """``size`` is the share of the labels that are drawn from the labels of the same batch, at random."""
    labels = batch.labels.clone()
    place = (labels != IGNORED).nonzero(as_tuple=True)
    held = labels[place]
    drawn = held[torch.randint(len(held), (len(held),), generator=generator)]
    labels[place] = torch.where(torch.rand(len(held), generator=generator) < target.size, drawn, held)
    return replace(batch, labels=labels)


@acting("batch", memory=_generator)
def other_distribution(target: Target, generator: torch.Generator, batch: Batch, step: int) -> Batch:
    tokens = torch.randint(int(batch.tokens.max()) + 1, batch.tokens.shape, generator=generator)
    return replace(batch, tokens=tokens, labels=torch.where(batch.labels == IGNORED, IGNORED, tokens))


# -- before the training ---------------------------------------------------------------------------------------------

torch_seed = changing(seed=lambda target: torch.manual_seed(4711))
numpy_seed = changing(seed=lambda target: np.random.seed(4711))
python_seed = changing(seed=lambda target: random.seed(4711))


@acting("model")
@torch.no_grad()
def other_tensor(target: Target, model: nn.Module) -> None:
    weight = _first_weight(model)
    weight.add_(torch.randn(weight.shape, generator=_generator(target)).to(weight) * 0.01 * target.size)


@acting("model")
def other_bit(target: Target, model: nn.Module) -> None:
    """The lowest bit of the mantissa of one element."""
    values = _first_weight(model).detach().view(-1)
    flip_bit(values, len(values) // 2, 0)


def _first_weight(model: nn.Module) -> Tensor:
    """The first parameter that lies whole on this rank; under ZeRO-3 the shard that this rank holds."""
    held = (p if p.numel() else getattr(p, "ds_tensor", p) for p in model.parameters())
    return next(weight for weight in held if weight.numel())


def _change_groups(name: str, change: NewValue, target: Target, optimizer: Any) -> None:
    """One of the optimizer's parameter groups becomes ``change(value, size)``."""
    for group in optimizer.param_groups:
        group[name] = change(group[name], target.size)


hyper_parameter = acting("optimizer")(_change_groups)  # before the training


@acting("before")
def hyper_parameter_later(
    name: str, change: NewValue, target: Target, module: nn.Module, optimizer: Any, step: int
) -> None:
    _change_groups(name, change, target, optimizer)


# a value that no collective depends on: another bucket size would hang the training instead
config_value = changing(
    config=lambda target, config: {**config, "gradient_clipping": config.get("gradient_clipping", 1.0) + target.size}
)


def environment(name: str, value: str, target: Target, me: int) -> Injection:
    return Injection(environment={name: value})


# -- the model's mode ------------------------------------------------------------------------------------------------

eval_mode = changing(before=lambda target, module, optimizer, step: module.eval())
# the module itself stays in training mode
dropout_off = changing(before=lambda target, module, optimizer, step: [inner.eval() for inner in dropouts(module)])
dropout_probability = changing(model=lambda target, module: _set_dropout(module, target.size))
dropout_probability_later = changing(before=lambda target, module, optimizer, step: _set_dropout(module, target.size))


@acting("afterwards")
@torch.no_grad()
def kept_in_evaluation(target: Target, module: nn.Module, optimizer: Any, step: int) -> None:
    """An evaluation behind the step before, and nobody calls ``train()``."""
    if step == target.step - 1:
        rows = make_rows(2, seed=1)
        module.eval()
        module(rows.tokens, rows.labels)


def dropouts(module: nn.Module) -> list[nn.Dropout]:
    return [inner for inner in module.modules() if isinstance(inner, nn.Dropout)]


def _set_dropout(module: nn.Module, probability: float) -> None:
    for inner in dropouts(module):
        inner.p = probability


@acting("before")
def autocast(target: Target, module: nn.Module, optimizer: Any, step: int) -> None:
    """The model's forward enters it by itself, as one does that a trainer has wrapped."""
    device = next(module.parameters()).device.type
    module.forward = torch.autocast(device, dtype=torch.bfloat16)(module.forward)


def optimizer_without_layer(target: Target, me: int) -> Injection:
    """The optimizer does not hold the parameters of one layer."""
    left_out: set[int] = set()

    def find(module: nn.Module) -> None:
        left_out.update(id(p) for name, p in module.named_parameters() if name.startswith(f"{LAST_LAYER}."))

    def leave(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in left_out]

    return Injection(model=find, optimizer=leave)


unfrozen = changing(before=lambda target, module, optimizer, step: module.requires_grad_(True))


def _output(module: nn.Module, layer: str, change: Callable[[Tensor], Tensor]) -> None:
    module.get_submodule(layer).register_forward_hook(lambda inner, given, output: change(output))


# the layer's output is a constant: no gradient for its parameters, so no hook fires; the loss is unchanged
detached_layer = changing(before=lambda target, module, optimizer, step: _output(module, LAST_LAYER, Tensor.detach))

# -- loss and gradient -----------------------------------------------------------------------------------------------

nan_loss = changing(loss=lambda target, loss, step: loss * float("nan"))
scaled_loss = changing(loss=lambda target, loss, step: loss * target.size)
# the logits are divided by ``size``
temperature = changing(
    before=lambda target, module, optimizer, step: _output(module, "head", lambda logits: logits / target.size)
)


@acting("before")
def other_loss(option: str, value: Any, target: Target, module: Any, optimizer: Any, step: int) -> None:
    """The model's own loss is made with another option of torch's ``cross_entropy``."""
    module.loss_options = {option: value}


def class_weights(target: Target, me: int) -> Injection:
    """Those of half of the classes are ``size``, the others 1."""
    weights = torch.ones(VOCABULARY)
    weights[::2] = target.size
    return other_loss("weight", weights, target, me)


class HiddenFactor(torch.autograd.Function):
    """A factor that no graph shows, as of a fused loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return loss * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def out_of_phase(target: Target, me: int) -> Injection:
    """All ranks train two tasks in turn, one with ``size`` times the loss; the target's rank then has the other one."""
    now = {"step": 0}

    def task(module: nn.Module, given: Any, loss: Tensor) -> Tensor:
        other = me == target.rank and now["step"] >= target.step
        hidden: Tensor = HiddenFactor.apply(loss, target.size if (now["step"] + other) % 2 else 1.0)  # type: ignore[no-untyped-call]
        return hidden

    def before(module: nn.Module, optimizer: Any, step: int) -> None:
        if not now["step"]:
            module.register_forward_hook(task)
        now["step"] = step

    return Injection(before=before)


# each parameter's by itself, at the norm ``size``
clipped_gradient = changing(
    gradient=lambda target, name, gradient, step: (
        gradient * (target.size / gradient.norm().clamp(min=1e-30)).clamp(max=1.0)
    )
)
scaled_gradient = changing(gradient=lambda target, name, gradient, step: gradient * target.size)
zero_gradient = changing(gradient=lambda target, name, gradient, step: torch.zeros_like(gradient))
# of the last block, which is one of several layers
scaled_layer = changing(
    gradient=lambda target, name, gradient, step: (
        gradient * target.size if name.startswith(f"{LAST_LAYER}.") else gradient
    )
)
frozen_layers = changing(
    gradient=lambda target, name, gradient, step: torch.zeros_like(gradient) if name.startswith("layers.") else gradient
)


@acting("gradient", memory=_generator)
def noisy_gradient(target: Target, generator: torch.Generator, name: str, gradient: Tensor, step: int) -> Tensor:
    """Adds noise of ``size`` times each gradient's norm: the direction turns, whatever the direction was."""
    return gradient + noise_like(gradient, target.size, generator)


@acting("gradient", memory=lambda target: {})
def stuck_gradient(target: Target, sent: dict[str, Tensor], name: str, gradient: Tensor, step: int) -> Tensor:
    """That of the step before the target's, again and again."""
    if step < target.step:
        sent[name] = gradient.detach().clone()
        return gradient
    return sent.get(name, gradient).clone()


@acting("gradient", memory=lambda target: [])
def _largest_element(
    change: Callable[[Tensor, int], object], target: Target, done: list[str], name: str, gradient: Tensor, step: int
) -> Tensor:
    """Of the first gradient that comes, and nothing else."""
    if done:
        return gradient
    done.append(name)
    corrupted = gradient.detach().clone()
    flat = corrupted.view(-1)
    change(flat, int(flat.abs().argmax()))
    return corrupted


infinite_element = partial(_largest_element, lambda flat, place: flat[place : place + 1].fill_(float("inf")))
flipped_element = partial(_largest_element, lambda flat, place: flip_bit(flat, place, top_exponent_bit(flat)))


def other_teacher(target: Target, me: int) -> Injection:
    """Every rank's steps use a frozen module beside the model; the weights of one rank's are others."""

    def hold(module: nn.Module) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(1 + (me == target.rank))
            teacher = nn.Linear(5, 7).requires_grad_(False)  # of a form that the model has not
        module.register_forward_pre_hook(lambda *_: (teacher(torch.ones(5)), None)[1])

    return Injection(model=hold)
