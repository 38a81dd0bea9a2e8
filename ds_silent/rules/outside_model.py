"""Check what lies beside the observed model: what is stepped is reduced, and what is frozen is the same on all ranks.

A loss with weights of its own, such as a classifier or a learned temperature, lies outside the module that
``DistributedDataParallel`` or ``fully_shard`` has wrapped. Nothing reduces its gradients, so that each rank trains its
own copy. A parameter counts if autograd brings its gradient, and ``step`` finds what it has brought, bit for bit, or
clipped. One that no optimizer holds is a note: the first backward's graph shows it. Silent: what ranks hold as their
own from the start, such as parts of a sharded classifier; another wrapper's parameters; gradients that the script
reduces, and masters that it fills.

A frozen module, such as a teacher, a text encoder or a reward model, is the same on all ranks, or their losses are not
the same function. Nobody broadcasts its weights. A module that is a shard, or that only some ranks have, is left out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ds_silent.device import ReadLater
from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework
from ds_silent.maths.fingerprint import short_hash, tensor_hash
from ds_silent.patches import Patches
from ds_silent.records import Severity
from ds_silent.rules.rule import Breach, Rule

_LOOKS, _ELEMENTS, _SHOWN = 8, 64, 3
_NODES = 1 << 16
_UNNAMED = "a parameter of no module"
_HASHED = 4096  # elements of each weight of a frozen module
_HARMLESS = {"_is_hf_initialized", "_no_weight_decay", "_no_reinit"}
"""Attributes of a weight that is whole; others may say which part of a weight it is."""
_CLIPPED = 1e-3  # of the largest element: what a clipping's factor leaves of proportion, also in bf16 with few elements


class OutsideModel(Rule):
    """Follow this rank's parameters that an optimizer holds and the observed model does not."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._names: dict[Tensor, str] = {}
        self._came: dict[Tensor, Tensor] = {}  # some elements of each gradient, as autograd left it
        self._later: list[tuple[int, list[Tensor], ReadLater]] = []  # step; whether each stayed
        self._since: dict[Tensor, int] = {}
        self._looks, self._key = 0, ""
        self._backwards = 0  # whose graphs were walked
        self._unheld: tuple[Breach, ...] | None = None  # as soon as one of them was this model's

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at each gradient as it has come, and as each step finds it."""
        patches.before_backward(partial(safely, self._begins))
        groups = self._framework.parameter_groups() or []
        own = set(map(id, self._framework.module.parameters()))
        beside = [one for group in groups for one in group if id(one) not in own and _is_plain(one)]
        if not beside:
            return
        self._names = {one: name or _UNNAMED for one, name in _names_of(beside, self._framework.wrapper).items()}
        self._key = f"outside:{short_hash([_some(one.detach()).tolist() for one in self._names])}"
        for parameter in self._names:
            patches.hook(parameter.register_post_accumulate_grad_hook, partial(safely, self._arrives))
        for optimizer in self._framework.optimizers():
            patches.hook(optimizer.register_step_pre_hook, partial(safely, self._stepping))

    def _begins(self, root: Any) -> None:
        groups = None if self._unheld is not None else self._framework.parameter_groups()
        if groups is not None and isinstance(root, Tensor):
            own = set(map(id, self._framework.module.parameters()))
            masters = {one.shape for group in groups for one in group if id(one) not in own}  # scripts write them back
            leaves, self._backwards = leaves_of(root), self._backwards + 1
            if own.isdisjoint(map(id, leaves)):  # another model's backward, or all are gathered anew for each (FSDP2)
                self._unheld = () if self._backwards == _LOOKS else None
                return
            own |= {id(one) for group in groups for one in group}
            unheld = [one for one in leaves if id(one) not in own and one.shape not in masters]
            names = _names_of(unheld, self._framework.wrapper) if unheld else {}  # both walk over all objects
            held = {id(one) for one in _held_by_optimizers()} if names else set()
            left = [name for one, name in names.items() if name and id(one) not in held]  # FSDP2's own are in no module
            self._unheld = (_no_optimizer(left, self._framework.step),) if left else ()

    def _arrives(self, parameter: Tensor) -> None:
        if self._looks < _LOOKS and parameter.grad is not None:
            self._came[parameter] = _some(parameter.grad).clone()

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        came, self._came = self._came, {}
        pairs = [(one, came[one], _some(one.grad)) for one in came if one.grad is not None]
        if pairs and self._looks < _LOOKS:
            self._looks += 1
            stayed = torch.stack([_unreduced(before, now).to(pairs[0][1].device) for _, before, now in pairs])
            self._later.append((self._framework.step, [one for one, *_ in pairs], ReadLater(stayed)))

    def breaches(self) -> tuple[Breach, ...]:
        while self._later and self._later[0][2].ready:
            step, parameters, later = self._later.pop(0)
            for parameter, stayed in zip(parameters, later.values.tolist(), strict=True):
                if stayed:
                    self._since.setdefault(parameter, step)
        unheld = self._unheld or ()
        if not self._since:
            return unheld
        names = [name for parameter, name in self._names.items() if parameter in self._since]
        one = len(names) == 1
        message = (
            f"{listed(names, _SHOWN)} {'lies' if one else 'lie'} outside the wrapped model, and the optimizer steps "
            f"{'it' if one else 'them'}: nothing reduces {'its' if one else 'their'} gradient, each rank trains its "
            "own copy by its own rows, and the copies part."
        )
        remedy = (
            "Put it into the module that is wrapped, wrap it in a DistributedDataParallel of its own, or reduce its "
            "gradient before each step."
        )
        since = min(self._since.values())
        return (
            *unheld,
            Breach(self._key, "unreduced-gradient", "warning", names[0], message, remedy, since, alike_on_all=True),
        )


class FrozenBeside(Rule):
    """Hash the modules that this rank holds beside the observed one and does not train, once."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._hashed: list[tuple[str, str, bool, ReadLater]] | None = None  # what is compared; its name; one is trained
        self._since = 0

    def breaches(self) -> tuple[Breach, ...]:
        if self._hashed is None:
            self._hashed, self._since = list(_frozen_beside(self._framework.module)), self._framework.step
        return tuple(self._held(*one) for one in self._hashed if one[-1].ready)

    def _held(self, thing: str, name: str, twin: bool, later: ReadLater) -> Breach:
        """Return what is a fault where other ranks hold others; a note where a copy of it is trained.

        So it is with an average of the weights, of which often one rank's alone is used.
        """
        message = f"{name} lies outside the observed model, nothing trains it, and its weights differ between ranks"
        remedy = (
            "Seed or load it alike on every rank, before code that draws on one rank alone. Do nothing if each rank is "
            "meant to have its own, or if one rank's alone is used."
        )
        key = f"{thing}:{short_hash(later.values.tolist())}"
        severity: Severity = "info" if twin else "warning"
        effects = ("outlier-rank",)
        return Breach(key, "weights-mismatch", severity, name, message, remedy, self._since, effects, unlike=thing)


def _frozen_beside(model: nn.Module) -> Iterator[tuple[str, str, bool, ReadLater]]:
    own = set(map(id, model.modules()))
    alive = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_modules" in one.__dict__]
    beside = [one for one in alive if own.isdisjoint(map(id, one.modules()))]
    inner = {id(child) for one in beside for child in one.children()}
    held = set(map(id, _held_by_optimizers()))
    outermost = [(one, _is_frozen(one, held)) for one in beside if id(one) not in inner]
    found: dict[tuple[type, tuple[torch.Size, ...]], list[nn.Module]] = {}
    for one, frozen in outermost:
        if frozen and all(map(_is_whole, one.parameters())):
            found.setdefault(_form(one), []).append(one)
    kinds = {kind for kind, _ in found}
    trained = [model, *(one for one, frozen in outermost if not frozen)] if found else []
    twins = {_form(part) for one in trained for part in one.modules() if type(part) in kinds}
    largest = sorted(found.items(), key=lambda one: -sum(map(torch.Size.numel, one[0][1])))
    for (kind, shapes), alike in largest[:_SHOWN]:
        hashes = [torch.stack([_hash(weight) for weight in one.parameters()]).sum(0) for one in alike]
        values = torch.stack(hashes).sum(0)  # Python's order of several is none
        thing = f"frozen:{kind.__name__}:{len(alike)}:{short_hash(shapes)}"
        name = f"{kind.__name__} of {sum(map(torch.Size.numel, shapes)):,} weights"
        yield thing, name, (kind, shapes) in twins, ReadLater(values)


def _is_frozen(module: nn.Module, held: Container[int]) -> bool:
    """Tell whether nothing trains it: no weight needs a gradient, or it is in evaluation mode and in no optimizer."""
    weights = list(module.parameters())
    flags = [weight.requires_grad for weight in weights]
    untouched = not module.training and all(one.grad is None and id(one) not in held for one in weights)
    return bool(weights) and (not any(flags) or untouched)


def _is_whole(weight: Tensor) -> bool:
    """Tell whether it is a plain weight: those that are sharded have a type or attributes of their own."""
    plain = type(weight) is nn.Parameter and not weight.is_meta and weight.numel() > 0
    return plain and vars(weight).keys() <= _HARMLESS


def _form(module: nn.Module) -> tuple[type, tuple[torch.Size, ...]]:
    return type(module), tuple(weight.shape for weight in module.parameters())


def _hash(weight: Tensor) -> Tensor:
    return tensor_hash(weight.detach().reshape(-1)[:_HASHED])


def leaves_of(root: Tensor) -> list[nn.Parameter]:
    """Return the parameters that a backward from ``root`` brings gradients, as far as ``_NODES`` of its graph show."""
    waiting, found = [root.grad_fn], []
    seen: set[Any] = set()
    while waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if type(leaf) is nn.Parameter:
            found.append(leaf)
        waiting += [inner for inner, _ in node.next_functions]
    return found


def _no_optimizer(names: list[str], step: int) -> Breach:
    one = len(names) == 1
    message = (
        f"{listed(names, _SHOWN)} {'lies' if one else 'lie'} outside the wrapped model, the loss depends on "
        f"{'it' if one else 'them'}, and no optimizer holds {'it' if one else 'them'}: nothing trains "
        f"{'it' if one else 'them'}."
    )
    remedy = "If that is meant, do nothing; requires_grad_(False) saves its gradient. Else give it to an optimizer."
    return Breach("outside, in no optimizer", "update-mismatch", "info", names[0], message, remedy, step)


def _held_by_optimizers() -> Iterator[Any]:
    for one in gc.get_objects():
        if issubclass(type(one), torch.optim.Optimizer):
            for group in getattr(one, "param_groups", ()):
                yield from group["params"]


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) in (Tensor, nn.Parameter) and parameter.is_leaf and parameter.requires_grad


def _some(values: Tensor) -> Tensor:
    return values.reshape(-1)[:_ELEMENTS].float()


def _names_of(parameters: Sequence[Tensor], own: object) -> dict[Tensor, str]:
    """Return those that no other wrapper of the process reduces, and what a module calls each; "" where none does."""
    names = {id(one): "" for one in parameters}
    for held in gc.get_objects():
        if not issubclass(type(held), nn.Module) or "_modules" not in held.__dict__:
            continue  # or a module that Python is about to free
        if issubclass(type(held), DistributedDataParallel) and held is not own:
            for one in held.parameters():
                names.pop(id(one), None)
        else:
            for path, one in held.named_parameters():
                name = f"{type(held).__name__}.{path}"
                if name.count(".") > names.get(id(one), name).count("."):  # the outermost module's
                    names[id(one)] = name
    return {one: names[id(one)] for one in parameters if id(one) in names}


def _unreduced(before: Tensor, now: Tensor) -> Tensor:
    """Tell whether a gradient is not 0 and the same, or the same but for a factor that a clipping has."""
    same = (before == now).all()
    if len(before) > 1:
        largest, other = before.abs().max(), now.abs().max()
        same |= (now * largest - before * other).abs().max() <= _CLIPPED * largest * other
    return same & before.any()
