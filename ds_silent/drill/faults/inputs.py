"""How each fault of :mod:`ds_silent.drill.faults.catalogue` is done: small functions on the pieces of a training.

    injection = same_batch(strike, me=1)
    rows = injection.rows(rows_of, step)      # the row numbers that rank 1 really takes

A maker (``same_batch``, ``scaled_gradient``, …) is called once per training and rank and returns what this rank does
differently; where nothing is different it returns ``NOTHING``. A gradient function is called in a leaf tensor hook
that is registered before the observer's: torch runs them in that order and hands on what they return, so the observer
sees the corrupted gradient as this rank's own, exactly as if the device had computed it wrongly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_silent.practice.model import IGNORED, LAST_LAYER

if TYPE_CHECKING:
    from ds_silent.drill.deepspeed.seams import Collective


@dataclass(frozen=True)
class Strike:
    """Whom a fault hits, among how many, from which optimizer step on (counted from 1), and how hard.

    ``stage`` and ``bf16``: of the training, because they decide who holds what.
    """

    rank: int
    ranks: int
    step: int
    size: float = 1.0
    stage: int = 0
    bf16: bool = False

    @property
    def partner(self) -> int:
        """The other rank of a fault that needs two."""
        return (self.rank + 1) % self.ranks


@dataclass(frozen=True)
class Shard:
    """What a rank's sampler believes: how many ranks, which one it is, the seed of the permutation."""

    ranks: int
    rank: int
    seed: int


@dataclass(frozen=True)
class Batch:
    """Rows of one micro-batch: ids (rows,) int64; tokens and labels (rows, length) int64."""

    ids: Tensor
    tokens: Tensor
    labels: Tensor


RowsOf = Callable[[int, int], Tensor]
"""``rows_of(rank, step)``: the row numbers that the sampler deals to ``rank`` at ``step``, all micro-batches."""
Config = dict[str, Any]


@dataclass(frozen=True)
class Injection:
    """What is different on one rank; a field that is not set changes nothing.

    Before ``initialize``: ``environment``, ``config``. Between ``initialize`` and the observer's ``attach``, because
    DeepSpeed makes the replicas equal in ``initialize``: ``seed``, ``model``, ``optimizer``, ``engine``. At every step,
    and the function itself knows from which on: ``rows`` (which rows), ``batch`` (their content), ``mode`` (the module,
    before the forward), ``loss``, ``gradient`` (parameter's name, gradient of one micro-batch, step). Behind the
    capture of the local gradient, see :mod:`ds_silent.drill.deepspeed.seams`: ``captured`` (name, gradient, step,
    whether the micro-batch is the last), ``reduction``, ``update`` (base optimizer, its step to be called, step),
    ``gathering``, ``afterwards`` (engine, step); ``repetition`` (a reduction that a response repeats),
    ``pieces`` (what an ordered reduction exchanges in a backward) and ``repair`` (what a collective of a repair has
    brought, step). ``change``: how large the corruption was, relative to the aggregated gradient, where that is known.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    config: Callable[[Config], Config] | None = None
    shard: Callable[[Shard], Shard] | None = None
    seed: Callable[[], None] | None = None
    model: Callable[[nn.Module], None] | None = None
    optimizer: Callable[[Any], None] | None = None
    engine: Callable[[Any], None] | None = None
    rows: Callable[[RowsOf, int], Tensor] | None = None
    batch: Callable[[Batch, int], Batch] | None = None
    content_of: Callable[[RowsOf, int], Tensor] | None = None  # rows whose content comes under the ids of ``rows``
    mode: Callable[[nn.Module, int], None] | None = None
    loss: Callable[[Tensor, int], Tensor] | None = None
    gradient: Callable[[str, Tensor, int], Tensor] | None = None
    captured: Callable[[str, Tensor, int, bool], Tensor | None] | None = None
    reduction: Callable[[Collective], None] | None = None
    repetition: Callable[[Collective], None] | None = None  # where it is not set, repetitions run clean
    pieces: Callable[[Collective], None] | None = None
    repair: Callable[[Tensor, int], None] | None = None
    update: Callable[[Any, Callable[[], Any], int], Any] | None = None
    gathering: Callable[[Collective], None] | None = None
    afterwards: Callable[[Any, int], None] | None = None
    change: Callable[[], float | None] | None = None


NOTHING = Injection()


def _generator(strike: Strike) -> torch.Generator:
    return torch.Generator().manual_seed(7919 + strike.rank)


# -- data ------------------------------------------------------------------------------------------------------------


def same_batch(strike: Strike, me: int) -> Injection:
    return Injection(rows=lambda rows_of, step: rows_of(0 if step >= strike.step else me, step))


def same_batch_as_neighbour(strike: Strike, me: int) -> Injection:
    if me != strike.rank:
        return NOTHING
    return Injection(rows=lambda rows_of, step: rows_of(strike.partner if step >= strike.step else me, step))


def neighbours_content(strike: Strike, me: int) -> Injection:
    if me != strike.rank:
        return NOTHING
    return Injection(content_of=lambda rows_of, step: rows_of(strike.partner if step >= strike.step else me, step))


def repeated_batch(strike: Strike, me: int) -> Injection:
    if me != strike.rank:
        return NOTHING
    return Injection(rows=lambda rows_of, step: rows_of(me, min(step, strike.step - 1)))


def sampler_seed_one_rank(strike: Strike, me: int) -> Injection:
    return Injection(shard=lambda shard: replace(shard, seed=shard.seed + 1)) if me == strike.rank else NOTHING


def sampler_seed_every_rank(strike: Strike, me: int) -> Injection:
    return Injection(shard=lambda shard: replace(shard, seed=shard.seed + me))


def sampler_alone(strike: Strike, me: int) -> Injection:
    return Injection(shard=lambda shard: Shard(1, 0, shard.seed))


def sampler_twice(strike: Strike, me: int) -> Injection:
    return Injection(shard=lambda shard: replace(shard, ranks=2 * shard.ranks))


def no_labels(strike: Strike, me: int) -> Injection:
    def unlabelled(batch: Batch, step: int) -> Batch:
        return replace(batch, labels=torch.full_like(batch.labels, IGNORED)) if step >= strike.step else batch

    return Injection(batch=unlabelled) if me == strike.rank else NOTHING


def label_noise(strike: Strike, me: int) -> Injection:
    """``size`` is the share of the labels that are drawn from the labels of the same batch, at random."""
    generator = _generator(strike)

    def noisy(batch: Batch, step: int) -> Batch:
        if step < strike.step:
            return batch
        labels = batch.labels.clone()
        place = (labels != IGNORED).nonzero(as_tuple=True)
        held = labels[place]
        drawn = held[torch.randint(len(held), (len(held),), generator=generator)]
        labels[place] = torch.where(torch.rand(len(held), generator=generator) < strike.size, drawn, held)
        return replace(batch, labels=labels)

    return Injection(batch=noisy) if me == strike.rank else NOTHING


def other_distribution(strike: Strike, me: int) -> Injection:
    generator = _generator(strike)

    def foreign(batch: Batch, step: int) -> Batch:
        if step < strike.step:
            return batch
        top = int(batch.tokens.max()) + 1
        tokens = torch.randint(top, batch.tokens.shape, generator=generator)
        return replace(batch, tokens=tokens, labels=torch.where(batch.labels == IGNORED, IGNORED, tokens))

    return Injection(batch=foreign) if me == strike.rank else NOTHING


# -- before the training ---------------------------------------------------------------------------------------------


def torch_seed(strike: Strike, me: int) -> Injection:
    def seed() -> None:
        torch.manual_seed(4711)

    return Injection(seed=seed) if me == strike.rank else NOTHING


def numpy_seed(strike: Strike, me: int) -> Injection:
    return Injection(seed=lambda: np.random.seed(4711)) if me == strike.rank else NOTHING


def python_seed(strike: Strike, me: int) -> Injection:
    return Injection(seed=lambda: random.seed(4711)) if me == strike.rank else NOTHING


def other_tensor(strike: Strike, me: int) -> Injection:
    def change(model: nn.Module) -> None:
        weight = _first_weight(model)
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=_generator(strike)).to(weight) * 0.01 * strike.size)

    return Injection(model=change) if me == strike.rank else NOTHING


def other_bit(strike: Strike, me: int) -> Injection:
    """The lowest bit of the mantissa of one element."""

    def change(model: nn.Module) -> None:
        weight = _first_weight(model)
        bits = weight.detach().view(-1).view(torch.int16 if weight.element_size() == 2 else torch.int32)
        bits[len(bits) // 2] ^= 1

    return Injection(model=change) if me == strike.rank else NOTHING


def _first_weight(model: nn.Module) -> Tensor:
    """The first parameter that lies whole on this rank; under ZeRO-3 the shard that this rank holds."""
    for parameter in model.parameters():
        held = parameter if parameter.numel() else getattr(parameter, "ds_tensor", parameter)
        if held.numel():
            return held
    raise ValueError("the model has no parameter on this rank")


def learning_rate(strike: Strike, me: int) -> Injection:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= strike.size

    return Injection(optimizer=change) if me == strike.rank else NOTHING


def weight_decay(strike: Strike, me: int) -> Injection:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] += strike.size

    return Injection(optimizer=change) if me == strike.rank else NOTHING


def config_value(strike: Strike, me: int) -> Injection:
    """A value that no collective depends on: another bucket size would hang the training instead."""

    def change(config: Config) -> Config:
        return {**config, "gradient_clipping": config.get("gradient_clipping", 1.0) + strike.size}

    return Injection(config=change) if me == strike.rank else NOTHING


def environment(name: str, value: str, strike: Strike, me: int) -> Injection:
    return Injection(environment={name: value}) if me == strike.rank else NOTHING


# -- loss and gradient -----------------------------------------------------------------------------------------------


def nan_loss(strike: Strike, me: int) -> Injection:
    return _loss(strike, me, lambda loss: loss * float("nan"))


def scaled_loss(strike: Strike, me: int) -> Injection:
    return _loss(strike, me, lambda loss: loss * strike.size)


def _loss(strike: Strike, me: int, change: Callable[[Tensor], Tensor]) -> Injection:
    if me != strike.rank:
        return NOTHING
    return Injection(loss=lambda loss, step: change(loss) if step >= strike.step else loss)


def eval_mode(strike: Strike, me: int) -> Injection:
    def left_on(module: nn.Module, step: int) -> None:
        if step == strike.step:
            module.eval()

    return Injection(mode=left_on) if me == strike.rank else NOTHING


def dropout_off(strike: Strike, me: int) -> Injection:
    """The module itself stays in training mode."""

    def switched(module: nn.Module, step: int) -> None:
        if step == strike.step:
            for inner in module.modules():
                if isinstance(inner, nn.Dropout):
                    inner.eval()

    return Injection(mode=switched) if me == strike.rank else NOTHING


def later(name: str, change: Callable[[Any, float], Any], strike: Strike, me: int) -> Injection:
    """One hyper-parameter of one rank's parameter groups becomes ``change(value, size)`` at the step."""

    def act(engine: Any, step: int) -> None:
        if step == strike.step - 1:  # behind the update of the step before
            for group in engine.optimizer.param_groups:
                group[name] = change(group[name], strike.size)

    return Injection(afterwards=act) if me == strike.rank else NOTHING


def multiplied(value: Any, size: float) -> Any:
    return value * size


def increased(value: Any, size: float) -> Any:
    return value + size


def first_beta(value: Any, size: float) -> Any:
    return (size, *value[1:])


def unfrozen(strike: Strike, me: int) -> Injection:
    def thaw(module: nn.Module, step: int) -> None:
        if step == strike.step:
            for parameter in module.parameters():
                parameter.requires_grad_(True)

    return Injection(mode=thaw) if me == strike.rank else NOTHING


def detached_layer(strike: Strike, me: int) -> Injection:
    """The layer's output is a constant: no gradient for its parameters, so no hook fires; the loss is unchanged."""

    def detach(module: nn.Module, step: int) -> None:
        if step == strike.step:
            module.get_submodule(LAST_LAYER).register_forward_hook(lambda layer, given, output: output.detach())

    return Injection(mode=detach) if me == strike.rank else NOTHING


def scaled_gradient(strike: Strike, me: int) -> Injection:
    return _gradient(strike, me, lambda name, gradient: gradient * strike.size)


def noisy_gradient(strike: Strike, me: int) -> Injection:
    """Adds noise of ``size`` times each gradient's norm: the direction turns, whatever the direction was."""
    generator = _generator(strike)

    def noisy(name: str, gradient: Tensor) -> Tensor:
        noise = torch.randn(gradient.shape, generator=generator)
        scale = strike.size * float(gradient.float().norm()) / float(noise.norm())
        return gradient + (noise * scale).to(gradient)

    return _gradient(strike, me, noisy)


def zero_gradient(strike: Strike, me: int) -> Injection:
    return _gradient(strike, me, lambda name, gradient: torch.zeros_like(gradient))


def scaled_layer(strike: Strike, me: int) -> Injection:
    """The gradient of the last block, which is one of several layers, times ``size``."""

    def scaled(name: str, gradient: Tensor) -> Tensor:
        return gradient * strike.size if name.startswith(f"{LAST_LAYER}.") else gradient

    return _gradient(strike, me, scaled)


def frozen_layers(strike: Strike, me: int) -> Injection:
    def freeze(name: str, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if name.startswith("layers.") else gradient

    return _gradient(strike, me, freeze)


def inf_gradient(strike: Strike, me: int) -> Injection:
    return _once(strike, me, lambda element: torch.full_like(element, float("inf")))


def bit_flip(strike: Strike, me: int) -> Injection:
    """Flips the top exponent bit of the element: of one below 2 in size it makes one above 2, often far above."""

    def flip(element: Tensor) -> Tensor:
        bits, mask = (torch.int16, 1 << 14) if element.element_size() == 2 else (torch.int32, 1 << 30)
        return torch.bitwise_xor(element.view(bits), mask).view(element.dtype)

    return _once(strike, me, flip)


def stuck_gradient(strike: Strike, me: int) -> Injection:
    sent: dict[str, Tensor] = {}

    def again(name: str, gradient: Tensor, step: int) -> Tensor:
        if step < strike.step:
            sent[name] = gradient.detach().clone()
            return gradient
        return sent.get(name, gradient).clone()

    return Injection(gradient=again) if me == strike.rank else NOTHING


def _gradient(strike: Strike, me: int, change: Callable[[str, Tensor], Tensor]) -> Injection:
    if me != strike.rank:
        return NOTHING
    return Injection(gradient=lambda name, gradient, step: change(name, gradient) if step >= strike.step else gradient)


def _once(strike: Strike, me: int, change: Callable[[Tensor], Tensor]) -> Injection:
    """Changes the largest element of the first parameter that has a gradient at the step, and nothing else."""
    done: list[str] = []

    def hit(name: str, gradient: Tensor, step: int) -> Tensor:
        if step != strike.step or done:
            return gradient
        done.append(name)
        corrupted = gradient.detach().clone()
        flat = corrupted.view(-1)
        place = int(flat.abs().argmax())
        flat[place : place + 1] = change(flat[place : place + 1])
        return corrupted

    return Injection(gradient=hit) if me == strike.rank else NOTHING
