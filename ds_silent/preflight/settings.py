"""Plain values that modules and optimizers are set to, which every rank's code must give alike.

    numbers = Numbers(module)
    numbers.look(); numbers.values               # as they are now; of many modules a part at each look
    numbers.items(values)                        # one per layer, for a comparison of the ranks

A module's settings are those of its plain attributes (numbers, flags, words, and tuples of them) that its constructor
takes, that torch names in ``__constants__``, or that are known by name. Counters and caches are none: each rank may
have its own. So are names that speak of a rank.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from torch import Tensor, nn

from ds_silent.device import local_of
from ds_silent.distributed.parts import listed
from ds_silent.framework import layers_of
from ds_silent.maths.fingerprint import short_hash
from ds_silent.patches.script_hooks import name_of_hook
from ds_silent.preflight.items import ALL_HOOKS, HOOKS, JOINT, MODULES_HOOKS, Item, item_of

PROBABILITIES = ("dropout", "dropout_p", "dropout_prob", "attention_dropout", "attn_dropout", "drop_prob", "layerdrop")
"""Attributes of modules (torch's ``MultiheadAttention`` and ``LSTM``, transformers', timm's) that are probabilities."""
KNOWN = frozenset({*PROBABILITIES, "p", "eps", "variance_epsilon", "momentum", "num_groups", "scaling", "temperature"})
WINDOW = 4096  # settings that are read at one look: 0.2 ms; of a model with more, each look reads the next ones
STATES = 16  # of an optimizer, whose step counters are read
ON_DEVICE = 4  # of them, where they lie on a device, each of which costs a kernel
_OWN = re.compile(r"(^|_)(rank|ranks|device|seed|worker|host|port|verbose|debug|log|logger|name|path|dir|file)(_|$)")
_PLAIN = (bool, int, float, str, type(None))

Holdings = tuple[tuple[str, ...], ...]


class Numbers:
    """The settings of a model's modules; ``values``: as looked at last, in parts of at most ``WINDOW``."""

    def __init__(self, module: nn.Module):
        self._layers, _ = layers_of([name for name, _ in module.named_parameters()])
        modules = dict(module.named_modules())
        self._names = [(name, attribute) for name, inner in modules.items() for attribute in settings_of(inner)]
        dicts = [modules[name].__dict__ for name, _ in self._names]
        attributes = [attribute for _, attribute in self._names]
        starts = range(0, len(dicts), WINDOW)
        self._windows = [(dicts[at : at + WINDOW], attributes[at : at + WINDOW]) for at in starts]
        self.values = [_read(*window) for window in self._windows]
        self._next = 0

    def look(self) -> None:
        """The next part as it is now."""
        if self._windows:
            self.values[self._next] = _read(*self._windows[self._next])
            self._next = (self._next + 1) % len(self._windows)

    def items(self, values: Sequence[list[Any]] | None = None) -> list[Item]:
        """One per layer of the parameters, whatever modules this rank has, and one for what is in none of them.

        ``values``: as an earlier look has found them; None: those of the last.
        """
        found: dict[str, list[tuple[str, str, Any]]] = {layer: [] for layer in (*self._layers, "")}
        flat = [value for window in (self.values if values is None else values) for value in window]
        for (name, attribute), value in zip(self._names, flat, strict=True):
            found[_layer_in(name, found)].append((name, attribute, value))
        return [
            item_of(f"settings of {layer or 'the other modules'}", "parameters", repr(held), _shown(held))
            for layer, held in found.items()
        ]


def settings_of(module: nn.Module) -> list[str]:
    """Names of the attributes of one module that are settings."""
    kind: Any = type(module)
    named = _settings_named(kind) | KNOWN
    return [
        name for name, value in module.__dict__.items() if name in named and name != "training" and _is_plain(value)
    ]


@lru_cache(maxsize=4096)
def _settings_named(kind: type) -> frozenset[str]:
    taken: set[str] = set()
    constants: set[str] = set()
    for base in kind.__mro__:
        constants.update(map(str, base.__dict__.get("__constants__", ())))
        if "__init__" in base.__dict__ and base not in (object, nn.Module):
            try:
                taken.update(inspect.signature(base.__dict__["__init__"]).parameters)
            except (TypeError, ValueError):  # it is no Python function
                continue
    return frozenset({name for name in taken if not _OWN.search(name)} | constants)


def _is_plain(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return len(values) <= 16 and all(isinstance(inner, _PLAIN) for inner in values)


def _read(dicts: Sequence[Mapping[str, Any]], attributes: Sequence[str]) -> list[Any]:
    """Two loops in C, and one comparison where nothing has changed."""
    return list(map(dict.get, dicts, attributes))  # type: ignore[arg-type]


def _layer_in(name: str, layers: Mapping[str, object]) -> str:
    """The layer that a module is in: the longest beginning of its name that is one."""
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name


def _shown(held: Sequence[tuple[str, str, Any]]) -> str:
    """What no shape implies comes first, for a text is cut; modules are named where they have other values."""
    values: dict[str, dict[str, list[str]]] = {}
    for name, attribute, value in sorted(held, key=lambda one: _order(one[2])):
        values.setdefault(attribute, {}).setdefault(value if isinstance(value, str) else repr(value), []).append(
            name or "the model"
        )
    parts = [
        f"{attribute} {text}" + (f" in {listed(names, 1)}" if len(by_value) > 1 else "")
        for attribute, by_value in values.items()
        for text, names in by_value.items()
    ]
    return JOINT.join(parts) or "none"


def _order(value: Any) -> int:
    kinds = (float, bool, str, int)
    return next((place for place, kind in enumerate(kinds) if isinstance(value, kind)), len(kinds))


def flag_items(what: str, names: Sequence[str], flags: bytes, words: tuple[str, str]) -> list[Item]:
    """One item per layer, named by it: how many of its modules or parameters are off, and the first of them."""
    items = []
    for layer, places in _by_layer([f"{name}." for name in names]):
        off = [names[place] for place in places if place < len(flags) and not flags[place]]
        rest = f" ({len(off)} of {len(places)})" if len(places) > 1 else ""
        shown = f"{off[0]} {words[1]}{rest}" if off else words[0]
        items.append(item_of(f"{what} of {layer}", "parameters", repr(off), shown))
    return items


def _by_layer(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Each layer, with the places of the names that are in it."""
    layers, numbers = layers_of(list(names))
    members: list[list[int]] = [[] for _ in layers]
    for place, layer in enumerate(numbers):
        members[layer].append(place)
    return list(zip(layers, members, strict=True))


# -- what an optimizer holds -----------------------------------------------------------------------------------------


def groups_of(optimizers: Iterable[Any]) -> list[Sequence[Tensor]]:
    """The parameters in each group of torch's optimizers."""
    return [group["params"] for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]


def groups_with(groups: Sequence[Any], names: Container[int]) -> list[Any]:
    """Return the groups of optimizers that hold parameters of which ``names`` has the ids; all, where none does.

    The others may be a rank's own, as embeddings that are dealt to the ranks.
    """
    own = [group for group in groups if any(id(parameter) in names for parameter in group["params"])]
    return own or list(groups)


def joined(values: Sequence[Any]) -> str:
    """The one value of a hyper-parameter where all groups agree, else all of them; as JSON."""
    texts = [json.dumps(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts) or "none"


def holdings_of(groups: Sequence[Sequence[Tensor]], names: Mapping[int, str]) -> Holdings:
    """Names of the model's parameters in each group (:func:`groups_of`) that has some, by ``id``.

    Empty where none is the model's: a rank's own shards have no name.
    """
    held = (tuple(names[id(p)] for p in group if id(p) in names) for group in groups)
    return tuple(group for group in held if group)


def holding_items(holdings: Holdings, names: Sequence[str]) -> list[Item]:
    """One per layer of the model's parameters ``names``; what else it holds, as embeddings, may be a rank's own."""
    group_of = {name: place for place, group in enumerate(holdings) for name in group}
    items = []
    for of_layer, places in _by_layer(names):
        inside = [names[place] for place in places]
        held = [(name, group_of[name]) for name in inside if name in group_of]
        lacking = next((name for name in inside if name not in group_of), None)
        shown = f"{len(held) or 'none'} of {len(inside)}" + (f", without {lacking}" if lacking else "")
        groups = sorted({group for _, group in held})
        shown += f", in group {', '.join(map(str, groups))}" if len(holdings) > 1 and held else ""
        what = shown if holdings else "not known"
        items.append(item_of(f"optimizer's parameters of {of_layer}", "optimizer", repr(held), what))
    return items


def hook_items(changed: Mapping[str, str], names: Iterable[str]) -> list[Item]:
    """The script's hooks that have changed a gradient, with the parameter; and for :func:`lacks_hook` all of them."""
    shown = JOINT.join(f"{parameter}: {hook}" for hook, parameter in sorted(changed.items())) or "none"
    words = ["|".join(f"{short_hash(hook):.0f}" for hook in sorted(hooks)) for hooks in (changed, names)]
    return [item_of(HOOKS, "parameters", shown), item_of(ALL_HOOKS, "parameters", "/".join(words), severity="info")]


_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # torch 2.4 to 2.13


def module_hook_item(module: nn.Module) -> Item:
    """Name the hooks on modules. Nobody can tell one that changes something from one that looks: they may differ."""
    held = (
        (name or type(inner).__name__, name_of_hook(hook))
        for name, inner in module.named_modules()
        for kind in _OF_MODULES
        for hook in getattr(inner, kind, {}).values()
    )
    shown = JOINT.join(f"{name}: {hook}" for name, hook in held) or "none"
    return item_of(MODULES_HOOKS, "parameters", shown, severity="info")


def lacks_hook(all_hooks: Sequence[str]) -> bool:
    """Tell of values of ``ALL_HOOKS`` whether a hook that has changed a gradient somewhere is not there elsewhere.

    Where it is, it may change one later: a hook may clip.
    """
    known = [[set(filter(None, part.split("|"))) for part in one.split("/")] for one in all_hooks]
    return len(known) > 1 and any(changed - there for changed, *_ in known for _, there in known)


def counters_of(optimizer: Any) -> Iterator[float | Tensor]:
    """Step counters of an optimizer's groups and of some of its states; tensors are on a device."""
    on_device = 0
    groups, states = getattr(optimizer, "param_groups", ()), getattr(optimizer, "state", {})
    for held in (*groups, *islice(states.values(), STATES)):
        count = held.get("step") if isinstance(held, Mapping) else None
        if isinstance(count, Tensor):
            count = local_of(count)
            if count.numel() != 1:
                continue
            if count.device.type == "cpu":
                yield float(count)
            elif on_device < ON_DEVICE:
                on_device += 1
                yield count.detach()
        elif isinstance(count, (int, float)):
            yield float(count)
