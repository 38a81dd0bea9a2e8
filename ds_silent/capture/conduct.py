"""What every rank's code must do alike while it trains: hyper-parameters, evaluation mode, which parameters train.

    conduct = Conduct(module, optimizers, words) # optimizers(): the torch optimizers that really step
    conduct.look_at_modes()                      # at the first gradient of a measured step
    observation = replace(observation, code=conduct.code(step))     # between the reduction and the optimizer
    told = conduct.agree(arrived, group, device, together)   # on all ranks alike, once per gathered observation

Each is a few hundred numbers on the host, hashed to 24 bits (fp32 carries them exactly; two settings look alike by
chance once in 17 million) and sent with the observation; the hash is made anew only when something has changed. Where
the ranks' hashes differ, all ranks have read so and ask each other once, by the preflight's comparison, what it is that
differs. A collective runs only where the set of ranks that differ is another one than before, and ``MOST_QUESTIONS``
times at most.

Modes are looked at when the gradients come, not when a forward runs: an evaluation between two steps leaves no trace,
whatever it forgets, and a rank that trains in evaluation mode cannot hide.

The random numbers of a rank's first training forward are compared too: where they are the same on all ranks, all use
the same dropout masks on different rows. That is how many scripts seed, and no fault: a note.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.capture.local_gradient import layers_of
from ds_silent.device import generator_state
from ds_silent.exchange.arrived import Arrived
from ds_silent.exchange.observation import Code, Gathered
from ds_silent.preflight import compare as preflight
from ds_silent.preflight.compare import Item, read_item
from ds_silent.ranks.parts import Parts, outvoted, parts_of, ranks_of
from ds_silent.ranks.together import Together
from ds_silent.records import Event
from ds_silent.words import Words

HYPER_PARAMETERS = {
    "lr": "learning rate",
    "weight_decay": "weight decay",
    "betas": "betas",
    "momentum": "momentum",
    **{name: name for name in ("eps", "alpha", "rho", "dampening", "nesterov", "amsgrad", "maximize", "max_grad_norm")},
}
"""What param_groups may hold and every rank must share. Other entries may be an optimizer's own state, of its shard."""
KINDS = ("hyper_parameters", "device_hyper_parameters", "training_modes", "trainable")
"""Fields of :class:`ds_silent.exchange.observation.Code`: 0 is not known."""
_REMEDIES = {  # by group of the preflight
    "optimizer": "Change hyper-parameters on every rank alike: look for a scheduler or callback that skips ranks.",
    "parameters": "Call train(), eval() and requires_grad_() on every rank alike: look for an evaluation or a freezing "
    "that some ranks run and do not undo.",
}
_GROUPS = {
    "hyper_parameters": "optimizer",
    "device_hyper_parameters": "optimizer",
    "training_modes": "parameters",
    "trainable": "parameters",
}
_WORDS = {"optimizer": "hyper-parameters", "parameters": "training modes or trainable parameters"}
MOST_QUESTIONS = 64  # per run
_EXTREMES: Parts = ((0,), (1,))  # of many ranks all know only the smallest and the largest hash
_REMEMBERED = 4  # measured steps: an observation is read one or two steps later
_ON_DEVICE = "on the device"
_TRAINING, _TRAINABLE = attrgetter("training"), attrgetter("requires_grad")

_News = tuple[dict[str, set[Parts]], dict[str, Parts], int]


@dataclass(frozen=True)
class Unlike:
    """What the ranks do not do alike at a step: one entry per group of things, ``ranks`` being the odd ones out."""

    key: str
    ranks: tuple[int, ...]
    where: str
    message: str
    remedy: str
    since: int


@dataclass(frozen=True)
class _Look:
    """This rank, at one step."""

    hyper_parameters: tuple[tuple[Any, ...], ...]  # by parameter group, in the order of HYPER_PARAMETERS
    on_device: tuple[Tensor, ...]
    modes: bytes  # one per module
    trainable: bytes  # one per parameter


class Conduct:
    """One rank's settings, and what all ranks know of each other's.

    Args:
        module: the model.
        optimizers: the torch optimizers that step, read anew each time.
        words: the framework's, for a note.

    Attributes:
        draws: None until the first training forward has been looked at; then a hash of the random numbers that it
            drew, 0 when it drew none.
    """

    def __init__(self, module: nn.Module, optimizers: Callable[[], Iterable[Any]], words: Words):
        self._optimizers, self._words = optimizers, words
        named = [(name or type(module).__name__, inner) for name, inner in module.named_modules()]
        self._module_names, self._modules = [name for name, _ in named], [inner for _, inner in named]
        self._parameter_names = [name for name, _ in module.named_parameters()]
        self._parameters = list(module.parameters())
        self._modes = self._trainable = b""
        self._looks: dict[int, _Look] = {}
        self._hashes: dict[str, tuple[Any, float]] = {}  # of what was hashed last
        self.draws: float | None = None
        self._state: tuple[bytes, ...] = ()
        self._asked: dict[str, Parts] = {}
        self._answer: tuple[Unlike, ...] = ()
        self._known: dict[str, set[Parts]] = {}  # told before step 1
        self._questions = 0
        self._noted = False

    # -- of this rank --------------------------------------------------------------------------------------------------

    def look_at_modes(self) -> None:
        """As they are while the gradients come. 10,000 modules of one parameter each take 2 ms."""
        self._modes = bytes(map(_TRAINING, self._modules))
        self._trainable = bytes(map(_TRAINABLE, self._parameters))

    def before_forward(self) -> None:
        """Of the first training forward: the generators as they are."""
        if self.draws is None:
            self._state = _generators()

    def after_forward(self) -> None:
        """The generators that were used are those whose state has changed."""
        if self.draws is None and self._state:
            used = [before for before, now in zip(self._state, _generators(), strict=True) if before != now]
            self.draws, self._state = _short_hash(used) if used else 0.0, ()

    def code(self, step: int) -> Code[float | Tensor]:
        """Hashes of ``step``, between its reduction and its optimizer. Values on a device are not waited for."""
        if not self._modes:
            self.look_at_modes()
        look = self._look()
        self._looks[step] = look
        while len(self._looks) > _REMEMBERED:
            del self._looks[min(self._looks)]
        on_device: float | Tensor = 0.0
        if look.on_device:
            values = torch.stack([value.detach().float().reshape(()) for value in look.on_device])
            on_device = (values * torch.arange(1, 1 + len(values), device=values.device)).sum()
            on_device = on_device.nan_to_num(nan=-1.0)  # compared by its size
        return Code(
            hyper_parameters=self._hashed("hyper_parameters", look.hyper_parameters),
            device_hyper_parameters=on_device,
            training_modes=self._hashed("training_modes", look.modes),
            trainable=self._hashed("trainable", look.trainable),
            first_draws=self.draws or 0.0,
        )

    def items(self, step: int) -> list[Item]:
        """What is compared when the ranks differ, as it was at ``step``; as many on every rank."""
        look = self._looks.get(step) or self._look()

        def of_groups(column: int) -> Callable[[], str]:
            return lambda: _joined([group[column] for group in look.hyper_parameters])

        items = [
            read_item(name, "optimizer", of_groups(column)) for column, name in enumerate(HYPER_PARAMETERS.values())
        ]
        on_device = [read_item("hyper-parameters on the device", "optimizer", lambda: _listed(look.on_device))]
        modes = _by_layer("training mode", self._module_names, look.modes, ("trains", "in evaluation mode"))
        trainable = _by_layer("trainable flags", self._parameter_names, look.trainable, ("trainable", "frozen"))
        return items + on_device + modes + trainable

    def _look(self) -> _Look:
        groups: list[tuple[Any, ...]] = []
        on_device: list[Tensor] = []
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                groups.append(tuple(_plain(group.get(name), on_device) for name in HYPER_PARAMETERS))
        return _Look(tuple(groups), tuple(on_device), self._modes, self._trainable)

    def _hashed(self, kind: str, value: Any) -> float:
        known = self._hashes.get(kind)
        if known is None or known[0] != value:
            self._hashes[kind] = known = value, _short_hash(value)
        return known[1]

    # -- of all ranks --------------------------------------------------------------------------------------------------

    def told_before(self, outcome: preflight.PreflightOutcome) -> None:
        """What the preflight has told is not told again while the same ranks differ."""
        for kind, group in _GROUPS.items():
            groups = (group, "config") if group == "optimizer" else (group,)
            parts = {one.parts for one in outcome.wrong if one.item.group in groups}
            self._known[kind] = parts | {_EXTREMES} if parts else parts

    def agree(
        self, arrived: Arrived, group: dist.ProcessGroup, device: torch.device, together: Together
    ) -> tuple[Unlike, ...]:
        """What the ranks do not do alike. Every rank calls it with the same observations, at the same step: where the
        ranks that differ are others than before, it is a collective that waits."""
        news = together.decided(lambda: self._news(arrived.known))
        if news is not None:
            self._known, self._asked, self._questions = news
            self._answer = unlike(_named(self._asked, arrived), arrived.step)
            if self._asked and self._questions <= MOST_QUESTIONS:
                items = together.alone(self.items, arrived.step) or []
                outcome = preflight.compare(items, group, device, together.once)
                self._answer = _told(preflight.events_of(outcome, arrived.step)) or self._answer
        return self._answer

    def _news(self, known_to_all: Gathered) -> _News | None:
        """What is known, asked, and how often, where other ranks differ than before; the same on every rank."""
        parts = {kind: found for kind in KINDS if (found := differing(known_to_all.code, kind))}
        known = {kind: self._known.get(kind, set()) & {parts.get(kind, ())} for kind in KINDS}
        new = {kind: found for kind, found in parts.items() if found not in known[kind]}
        if new == self._asked:
            self._known = known
            return None
        return known, new, self._questions + bool(new)

    def unasked(self, arrived: Arrived) -> tuple[Unlike, ...]:
        """The same without asking, where the ranks do not come together any more; nothing where it is told already."""
        parts = {kind: found for kind in KINDS if (found := differing(arrived.known.code, kind))}
        new = {kind: found for kind, found in parts.items() if found not in self._known.get(kind, ())}
        return () if new == self._asked else unlike(_named(new, arrived), arrived.step)

    def note(self, known: Gathered, ranks: int) -> Event | None:
        """Once: that the first forward drew the same random numbers on all ranks."""
        draws = known.code.first_draws
        if self._noted or len(draws) < 2 or not bool((draws > 0).all()):
            return None
        self._noted = True
        if not bool((draws == draws[0]).all()):
            return None
        message = (
            f"The first forward drew the same random numbers on all {ranks} ranks: dropout and other noise use "
            "the same masks on different rows, so that they average less than they could."
        )
        remedy = (
            "Nothing is wrong. If masks are to differ, seed each rank's generators with seed + rank once the model is "
            f"made; leave them alike where ranks must draw alike ({self._words.same_draws})."
        )
        return Event(known.step, "seed-mismatch", "info", (), "first forward", None, None, message, remedy)


def differing(code: Code[Tensor], kind: str) -> Parts | None:
    """Ranks by equal value, the largest part first; None where all are equal, or where some rank's is not known."""
    values: Tensor = getattr(code, kind)
    if not bool((values != 0).all()) or bool((values == values[0]).all()):
        return None
    return parts_of(values.tolist())


def _named(parts: Mapping[str, Parts], arrived: Arrived) -> Mapping[str, Parts]:
    """With the ranks themselves, where they are known."""
    if arrived.make is None:
        return parts
    return {kind: differing(arrived.all.code, kind) or part for kind, part in parts.items()}


def unlike(parts: Mapping[str, Parts], step: int) -> tuple[Unlike, ...]:
    """What the hashes alone say."""
    found: dict[tuple[str, Parts], Unlike] = {}
    for kind, ranks in parts.items():
        group, odd = _GROUPS[kind], outvoted(ranks)
        shown = "; ".join(ranks_of(part) for part in ranks[:3])
        message = f"The {_WORDS[group]} differ between ranks: {shown}{'; …' if len(ranks) > 3 else ''}."
        found[group, ranks] = Unlike(f"unlike:{group}:{odd}", odd, _WORDS[group], message, _REMEDIES[group], step)
    return tuple(found.values())


def _told(events: Sequence[Event]) -> tuple[Unlike, ...]:
    found = []
    for event in events:
        optimizer = event.where in (*HYPER_PARAMETERS.values(), "hyper-parameters on the device")
        group = "optimizer" if optimizer else "parameters"
        where = event.where or group
        found.append(
            Unlike(f"unlike:{group}:{event.ranks}", event.ranks, where, event.message, _REMEDIES[group], event.step)
        )
    return tuple(found)


def _generators() -> tuple[bytes, ...]:
    """States of torch's generators, which both live on the host; nothing where a device does not give its own."""
    try:
        return tuple(state.cpu().numpy().tobytes() for state in (torch.get_rng_state(), generator_state()))
    except Exception:  # a note is not worth an internal error
        return ()


def _short_hash(value: Any) -> float:
    """1 to 2**24 - 1, which fp32 carries exactly."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") % ((1 << 24) - 1) + 1)


def _plain(value: Any, on_device: list[Tensor]) -> Any:
    """Something that compares by value. A tensor on a device is kept for a lazy comparison: reading it would wait."""
    if isinstance(value, Tensor):
        if value.device.type == "cpu":
            return value.tolist()
        if value.numel() == 1:
            on_device.append(value)
        return _ON_DEVICE
    if isinstance(value, (list, tuple)):
        return tuple(_plain(inner, on_device) for inner in value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _joined(values: Sequence[Any]) -> str:
    """One value where all parameter groups that have one agree, else all of them."""
    texts = [json.dumps(value) for value in values if value is not None]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts) or "none"


def _listed(values: Sequence[Tensor]) -> str:
    return ", ".join(str(float(value)) for value in values) or "none"


def _by_layer(what: str, names: Sequence[str], flags: bytes, words: tuple[str, str]) -> list[Item]:
    """One item per layer, named by it: how many of its modules or parameters are off, and the first of them."""
    layers, numbers = layers_of([f"{name}." for name in names])
    members: list[list[int]] = [[] for _ in layers]
    for place, layer in enumerate(numbers):
        members[layer].append(place)
    items = []
    for name, places in zip(layers, members, strict=True):
        off = [names[place] for place in places if place < len(flags) and not flags[place]]
        rest = f" ({len(off)} of {len(places)})" if len(places) > 1 else ""
        shown = f"{off[0]} {words[1]}{rest}" if off else words[0]
        items.append(preflight.item_of(f"{what} of {name}", "parameters", repr(off), shown))
    return items
