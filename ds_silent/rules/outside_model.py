"""Check what lies beside the observed model: what is stepped is reduced, and what is frozen is the same on all ranks.

A loss with weights of its own, such as a classifier or a learned temperature, lies outside the module that
``DistributedDataParallel`` or ``fully_shard`` has wrapped. Nothing reduces its gradients, so that each rank trains its
own copy. A parameter counts if autograd brings its gradient, and each ``step`` finds what it has brought, bit for bit,
or clipped. One that no optimizer holds is a note: the first backward's graph shows it. So is what was not the same on
all ranks from the start: part of a sharded classifier, or made before the ranks had one seed. Silent: what lies behind
a function of the script's that communicates, such as tables that are dealt to the ranks; another wrapper's parameters;
gradients that the script reduces, and masters that it fills.

A frozen module, such as a teacher, a text encoder or a reward model, is the same on all ranks, or their losses are not
the same function. Nobody broadcasts its weights. A module that is a shard, or that only some ranks have, is left out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from ds_silent.device import ReadLater
from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework
from ds_silent.maths.fingerprint import short_hash, tensor_hash
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach, Rule

_LOOKS, _ELEMENTS, _SHOWN = 8, 64, 3
_NODES = 1 << 16
_UNNAMED = "a parameter of no module"
_USED_WITHIN = 4  # measured steps
_HASHED = 4096  # elements of each weight of a frozen module
_HARMLESS = {"_is_hf_initialized", "_no_weight_decay", "_no_reinit"}
"""Attributes of a weight that is whole; others may say which part of a weight it is."""
_COLLECTIVES = ("all_to_all", "all_gather", "all_reduce", "reduce_scatter", "isend", "irecv")
_CLIPPED = 1e-3  # of the largest element: what a clipping's factor leaves of proportion, also in bf16 with few elements


class OutsideModel(Rule):
    """Follow this rank's parameters that an optimizer holds and the observed model does not."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._names: dict[Tensor, str] = {}
        self._came: dict[Tensor, Tensor] = {}  # some elements of each gradient, as autograd left it
        self._later: list[tuple[int, list[Tensor], ReadLater]] = []  # step; how each was found
        self._since: dict[Tensor, int] = {}
        self._reduced: set[Tensor] = set()  # another gradient was found than has come
        self._looks, self._arrived, self._key = 0, 0, ""  # arrived: the step under way as the newest gradient came
        self._backwards = 0  # whose graphs were walked
        self._unheld: tuple[Breach, ...] | None = None  # as soon as one of them was this model's
        self._dealt: set[int] = set()  # ids of parameters whose gradients come from other ranks

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at each gradient as it has come, and as each step finds it."""
        self._patches, self._safely = patches, safely
        patches.before_backward(partial(safely, self._begins))
        groups = self._framework.parameter_groups() or []
        own = set(map(id, self._framework.module.parameters()))
        beside = [one for group in groups for one in group if id(one) not in own and _is_plain(one)]
        if beside:
            self._follow(_names_of(beside, self._framework.wrapper), self._framework.optimizers())

    def _follow(self, names: dict[Tensor, str], optimizers: Iterable[Any]) -> None:
        self._names |= {one: name or _UNNAMED for one, name in names.items()}
        self._key = f"outside:{short_hash([_some(one.detach()).tolist() for one in self._names])}"
        for parameter in names:
            self._patches.hook(parameter.register_post_accumulate_grad_hook, partial(self._safely, self._arrives))
        for optimizer in optimizers:
            self._patches.hook(optimizer.register_step_pre_hook, partial(self._safely, self._stepping))

    def _begins(self, root: Any) -> None:
        groups = None if self._unheld is not None else self._framework.parameter_groups()
        if groups is not None and isinstance(root, Tensor):
            own = set(map(id, self._framework.module.parameters()))
            masters = {one.shape for group in groups for one in group if id(one) not in own}  # scripts write them back
            nodes, self._backwards = nodes_behind([root.grad_fn]), self._backwards + 1
            leaves = leaves_among(nodes)
            if own.isdisjoint(map(id, leaves)):  # another model's backward, or all are gathered anew for each (FSDP2)
                self._unheld = () if self._backwards == _LOOKS else None
                return
            self._dealt = set(map(id, leaves_among(nodes_behind(filter(_communicates, nodes)))))
            own |= {id(one) for group in groups for one in group}
            unheld = [one for one in leaves if id(one) not in own and one.shape not in masters]
            names = _names_of(unheld, self._framework.wrapper) if unheld else {}  # both walk over all objects
            named = {one: name for one, name in names.items() if name}  # FSDP2's own are in no module
            held = _optimizers_of() if named else {}  # which the observer was not given
            theirs = {one: name for one, name in named.items() if id(one) in held and _is_plain(one)}
            self._follow(theirs, {id(one): one for one in (held[id(weight)] for weight in theirs)}.values())
            left = [name for one, name in named.items() if id(one) not in held]
            self._unheld = (_no_optimizer(left, self._framework.step),) if left else ()

    def _arrives(self, parameter: Tensor) -> None:
        if self._looks < _LOOKS and parameter.grad is not None:
            self._came[parameter], self._arrived = _some(parameter.grad).clone(), self._framework.step

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        came, self._came = self._came, {}
        pairs = [(one, before, _some(one.grad)) for one, before in came.items() if one.grad is not None]
        if pairs and self._looks < _LOOKS:
            self._looks += 1
            found = torch.stack([_compared(before, now).to(pairs[0][1].device) for _, before, now in pairs])
            self._later.append((self._arrived, [one for one, *_ in pairs], ReadLater(found)))

    def breaches(self) -> tuple[Breach, ...]:
        while self._later and self._later[0][2].ready:
            step, parameters, later = self._later.pop(0)
            for parameter, (stayed, differs) in zip(parameters, later.values.tolist(), strict=True):
                if stayed:
                    self._since.setdefault(parameter, step)
                elif differs:
                    self._reduced.add(parameter)
        found, stayed_at = self._unheld or (), self._since.items()
        if since := {one: at for one, at in stayed_at if id(one) not in self._dealt and one not in self._reduced}:
            names = [name for parameter, name in self._names.items() if parameter in since]
            found += tuple(word(self._key, names, min(since.values())) for word in (_unreduced_copies, _own_from_start))
        return found


class FrozenBeside(Rule):
    """Hash the modules beside the observed one that this rank's steps use and nothing trains.

    They are found at the first measured step, and told at the second in which one was called: what only an evaluation
    calls, or nobody, is none. Where its weights have changed by then it is not frozen, as an average is not.
    """

    def __init__(self, framework: Framework):
        self._framework = framework
        self._patches = Patches()  # hooks of the modules, until all is known
        self._safely: Callable[..., Any] = lambda function, *given: function(*given)
        self._found: list[_Frozen] | None = None
        self._looks = self._since = 0
        self._told: tuple[Breach, ...] = ()

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Let hooks end with the observation."""
        self._safely = safely
        patches.also(self._patches.undo)

    def breaches(self) -> tuple[Breach, ...]:
        self._looks += 1
        if self._found is None:
            self._since, self._found = self._framework.step, _frozen_beside(self._framework.module)
            for one in self._found:
                for module in one.called_by():
                    call = partial(self._safely, one.is_called)
                    self._patches.hook(module.register_forward_pre_hook, call)
        elif self._found:
            still = [one for one in self._found if one.later.ready and one.versions == one.versions_now()]
            self._told = tuple(_unlike(one, self._since) for one in still if one.called)
            if self._looks > _USED_WITHIN:
                self._patches.undo()
                self._found = []
        return self._told


class _Frozen:
    """Modules of one form that nothing trains, and a hash of the weights of all of them."""

    def __init__(self, name: str, shapes: tuple[torch.Size, ...], alike: list[nn.Module]):
        self._modules = alike
        self.thing = f"frozen:{name}:{len(alike)}:{short_hash(shapes)}"
        self.name = f"{name} of {sum(map(torch.Size.numel, shapes)):,} weights"
        self.versions, self.called = self.versions_now(), False
        hashes = [torch.stack([tensor_hash(one.detach().reshape(-1)[:_HASHED]) for one in _held_by(m)]) for m in alike]
        self.later = ReadLater(torch.stack([one.sum(0) for one in hashes]).sum(0))  # their order is Python's, or none

    def versions_now(self) -> list[int]:
        held = (one for module in self._modules for one in _held_by(module))
        return [0 if one.is_inference() else one._version for one in held]

    def called_by(self) -> Iterator[nn.Module]:
        """Yield the modules of which a call shows that one of these is used: methods of its own may not be seen."""
        for module in self._modules:
            yield from (inner for inner in module.modules() if inner is module or inner._parameters)

    def is_called(self, *_: Any) -> None:
        self.called = True


def _unlike(one: _Frozen, since: int) -> Breach:
    """Return what is a fault where few ranks hold others than most; where each has its own that may be meant."""
    message = f"{one.name} lies outside the observed model, no optimizer steps it, and its weights differ between ranks"
    remedy = (
        "Seed or load it alike on every rank, before code that draws on one rank alone. Do nothing if each rank is "
        "meant to have its own."
    )
    key = f"{one.thing}:{short_hash(one.later.values.tolist())}"
    return Breach(key, "weights-mismatch", "warning", one.name, message, remedy, since, unlike=one.thing)


def _frozen_beside(model: nn.Module) -> list[_Frozen]:
    """Return the largest modules that are frozen as a whole, outside of ``model``."""
    own = set(map(id, model.modules()))
    alive = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_modules" in one.__dict__]
    held = _optimizers_of()
    frozen = [one for one in alive if id(one) not in own and _is_frozen(one, held)]
    inner = {id(child) for one in frozen for child in one.children()}
    found: dict[tuple[str, tuple[torch.Size, ...], torch.device], list[nn.Module]] = {}
    for one in frozen:
        devices, shapes = {weight.device for weight in _held_by(one)}, tuple(weight.shape for weight in _held_by(one))
        lone = type(one) is nn.Embedding  # which may hold a rank's data
        if id(one) not in inner and len(devices) == 1 and not lone:
            found.setdefault((type(one).__name__, shapes, devices.pop()), []).append(one)
    largest = sorted(found.items(), key=lambda one: -sum(map(torch.Size.numel, one[0][1])))
    return [_Frozen(name, shapes, alike) for (name, shapes, _), alike in largest[:_SHOWN]]


def _is_frozen(module: nn.Module, held: Container[int]) -> bool:
    """Tell whether nothing trains it: no weight needs a gradient, or it is in evaluation mode and in no optimizer.

    It must hold all of its weights: those that are shards have a type or attributes of their own.
    """
    weights = list(module.parameters())
    if not weights or not all(map(_is_whole, weights)):
        return False
    untouched = not module.training and all(one.grad is None and id(one) not in held for one in weights)
    return untouched or not any(weight.requires_grad for weight in weights)


def _is_whole(weight: Tensor) -> bool:
    plain = type(weight) is nn.Parameter and weight.layout is torch.strided and not weight.is_meta
    return plain and weight.numel() > 0 and vars(weight).keys() <= _HARMLESS


def _held_by(module: nn.Module) -> Iterator[Tensor]:
    """Yield the weights, and the running statistics that a normalisation uses."""
    yield from module.parameters()
    for inner in module.modules():
        if isinstance(inner, _NormBase) and not inner.training and isinstance(inner.running_mean, Tensor):
            yield from (one for one in (inner.running_mean, inner.running_var) if one is not None)


def nodes_behind(starts: Iterable[Any]) -> list[Any]:
    """Return the nodes that a backward from ``starts`` reaches, ``_NODES`` at most, in the same order on every rank."""
    waiting, seen = list(starts), dict[Any, None]()
    while waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting += [inner for inner, _ in node.next_functions]
    return list(seen)


def leaves_among(nodes: Iterable[Any]) -> list[nn.Parameter]:
    """Return the parameters to which nodes bring gradients."""
    leaves = (getattr(node, "variable", None) for node in nodes)
    return [leaf for leaf in leaves if type(leaf) is nn.Parameter]


def _communicates(node: Any) -> bool:
    """Tell whether a node runs a Python function whose backward calls a collective, by the names in its code."""
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    known = getattr(backward, "__globals__", {})
    called = [backward, *(known.get(name) for name in _names_in(backward))]
    return any(word in name for one in called for name in _names_in(one) for word in _COLLECTIVES)


def _names_in(function: Any) -> tuple[str, ...]:
    return getattr(getattr(function, "__code__", None), "co_names", ())


def _outside(names: list[str]) -> tuple[str, str, str]:
    """Return how a sentence on parameters outside the model begins, and the pronouns that it goes on with."""
    verb, them, their = ("lies", "it", "its") if len(names) == 1 else ("lie", "them", "their")
    return f"{listed(names, _SHOWN)} {verb} outside the wrapped model", them, their


def _no_optimizer(names: list[str], step: int) -> Breach:
    begins, them, _ = _outside(names)
    message = f"{begins}, the loss depends on {them}, and no optimizer holds {them}: nothing trains {them}."
    remedy = "If that is meant, do nothing; requires_grad_(False) saves its gradient. Else give it to an optimizer."
    return Breach("outside, in no optimizer", "update-mismatch", "info", names[0], message, remedy, step)


def _unreduced_copies(key: str, names: list[str], since: int) -> Breach:
    begins, them, their = _outside(names)
    message = (
        f"{begins}, and the optimizer steps {them}: nothing reduces {their} gradient, each rank trains its own copy by "
        "its own rows, and the copies part."
    )
    remedy = (
        "Put it into the module that is wrapped, wrap it in a DistributedDataParallel of its own, or reduce its "
        "gradient before each step."
    )
    return Breach(key, "unreduced-gradient", "warning", names[0], message, remedy, since, alike_on_all=True)


def _own_from_start(key: str, names: list[str], since: int) -> Breach:
    """Word the same of parameters that were no copies to begin with."""
    begins, _, their = _outside(names)
    message = f"{begins}, nothing reduces {their} gradient, and the ranks did not begin with the same values"
    remedy = (
        "Do nothing if each rank is to have its own, such as its part of a sharded classifier. Else make it behind the "
        "seed that all ranks share, and put it into the module that is wrapped."
    )
    thing = f"outside:{short_hash(names)}"
    return Breach(f"own:{key}", "unreduced-gradient", "info", names[0], message, remedy, since, unlike=thing)


def _optimizers_of() -> dict[int, Any]:
    """Return an optimizer of each parameter that any of the process holds, by the parameter's id."""
    alive = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    return {id(one): each for each in alive for group in getattr(each, "param_groups", ()) for one in group["params"]}


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) in (Tensor, nn.Parameter) and parameter.is_leaf and parameter.requires_grad


def _some(values: Tensor) -> Tensor:
    return (values._values() if values.is_sparse else values).reshape(-1)[:_ELEMENTS].float()


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


def _compared(before: Tensor, now: Tensor) -> Tensor:
    """Tell whether a gradient is not 0 and the same, or the same but for a clipping's factor; and whether it differs.

    One or two numbers say nothing by their proportion: the two gradients of a softmax over two weights have one sum.
    """
    if before.shape != now.shape:  # of a sparse one other rows have come
        return torch.tensor([False, True], device=now.device)
    same, largest, other = (before == now).all(), before.abs().max(), now.abs().max()
    scaled = (now * largest - before * other).abs().max() <= _CLIPPED * largest * other
    stayed = (same | scaled if len(before) > 2 else same) & before.any() & now.any()
    return torch.stack([stayed, ~(same | scaled) | (now.any() & ~before.any())])
