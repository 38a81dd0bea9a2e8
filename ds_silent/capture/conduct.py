"""What every rank's code must do alike while it trains: hyper-parameters and what optimizers hold, their step counters,
evaluation mode, which parameters train, the settings of modules, autocast.

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

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.capture.autocast import Autocast
from ds_silent.capture.objective import Objective
from ds_silent.capture.same_objective import SameObjective
from ds_silent.capture.untrained import NOTHING, Missed, Untrained, reported
from ds_silent.capture.untrained import Unlike as Unlike
from ds_silent.device import generator_state
from ds_silent.distributed.parts import Parts, outvoted, parts_of, ranks_of
from ds_silent.distributed.together import Together
from ds_silent.exchange.collectives import Arrived
from ds_silent.exchange.observation import Code, Gathered
from ds_silent.framework import Covers
from ds_silent.maths.fingerprint import short_hash
from ds_silent.preflight.comparison import PreflightOutcome, compare
from ds_silent.preflight.items import Item, item_of, read_item
from ds_silent.preflight.messages import events_of
from ds_silent.preflight.settings import (
    Holdings,
    Numbers,
    counters_of,
    flag_items,
    groups_of,
    holding_items,
    holdings_of,
)
from ds_silent.records import Event, EventKind
from ds_silent.text import Words

HYPER_PARAMETERS = {
    "lr": "learning rate",
    "weight_decay": "weight decay",
    "betas": "betas",
    "momentum": "momentum",
    **{name: name for name in ("eps", "alpha", "rho", "dampening", "nesterov", "amsgrad", "maximize", "max_grad_norm")},
}
"""What param_groups may hold and every rank must share. Other entries may be an optimizer's own state, of its shard."""
OBJECTIVE: Literal["objective"] = "objective"
"""Compared by :mod:`ds_silent.capture.same_objective`."""
_REMEDIES = {  # by group of the preflight
    "optimizer": "Change hyper-parameters on every rank alike: look for a scheduler or callback that skips ranks.",
    "parameters": "Call train(), eval() and requires_grad_() on every rank alike: look for an evaluation or a freezing "
    "that some ranks run and do not undo.",
    "settings": "Make the model with the same numbers on every rank, and change them on every rank at the same step.",
    "autocast": "Enter torch.autocast with the same arguments around the forward on every rank.",
    "holdings": "Give every rank's optimizer the same parameters in the same groups.",
    "counters": "Load the same checkpoint on every rank, with the optimizer's state, and step it on every rank.",
    OBJECTIVE: "Make the loss on every rank alike: look for a branch on the rank, another configuration of the loss, a "
    "sum for a mean, and a division by accumulation, tokens or ranks that is missing or done twice.",
}
_GROUPS = {
    "hyper_parameters": "optimizer",
    "device_hyper_parameters": "optimizer",
    "training_modes": "parameters",
    "trainable": "parameters",
    "settings": "settings",
    "autocast": "autocast",
    "counters": "counters",
    OBJECTIVE: OBJECTIVE,
}
_WORDS = {
    "optimizer": "hyper-parameters",
    "parameters": "training modes or trainable parameters",
    "settings": "settings of the model's modules",
    "autocast": "autocast states",
    "counters": "optimizers' step counters",
    OBJECTIVE: "objectives",
}
KINDS = tuple(kind for kind in _GROUPS if kind != OBJECTIVE)
"""Fields of :class:`ds_silent.exchange.observation.Code`: 0 is not known."""
_OF_PREFLIGHT = {"optimizer": ("optimizer", "config"), "counters": ("optimizer", "config"), "settings": ("parameters",)}
"""Groups of the preflight in which a thing may have been told; else that of the same name."""
_BEGINNINGS = {  # of an item's name, and what it is one of
    "training mode": "parameters",
    "trainable flags": "parameters",
    "settings of": "settings",
    "autocast": "autocast",
    "optimizer's parameters": "holdings",
    "optimizer's step": "counters",
}
MOST_QUESTIONS = 64  # per run
EXACT = 1 << 24  # whole numbers below it are exact in fp32
_EXTREMES: Parts = ((0,), (1,))  # of many ranks all know only the smallest and the largest hash
_REMEMBERED = 4  # measured steps: an observation is read one or two steps later
_ON_DEVICE = "on the device"
_TRAINS = "trains"
_TRAINING, _TRAINABLE = attrgetter("training"), attrgetter("requires_grad")

_News = tuple[dict[str, set[Parts]], dict[str, Parts], int]


@dataclass(frozen=True)
class _Look:
    """This rank, at one step."""

    hyper_parameters: tuple[tuple[Any, ...], ...]  # by parameter group, in the order of HYPER_PARAMETERS
    holdings: Holdings
    on_device: tuple[Tensor, ...]
    counter: float  # the largest of the optimizers', and 1; 0 where they count on a device, or not at all
    modes: bytes  # one per module
    trainable: bytes  # one per parameter
    settings: tuple[list[Any], ...]  # of modules
    autocast: tuple[str, ...]
    missed: Missed  # of the trainable ones
    objective: tuple[str, Any, float] = ("", (), 0.0)  # for people, its structure and its number


class Conduct:
    """One rank's settings, and what all ranks know of each other's.

    Args:
        module: the model.
        optimizers: the torch optimizers that step, read anew each time.
        words: the framework's, for a note.
        covers: who knows which gradients are reduced and which parameters optimizers hold; None where nobody does.

    Attributes:
        draws: None until the first training forward has been looked at; then a hash of the random numbers that it
            drew, 0 when it drew none.
        autocast: of its forwards.
        objective: what this rank's backwards begin with.
        differing: what differs between the ranks at the step that was read last, the same on every rank.
    """

    def __init__(
        self, module: nn.Module, optimizers: Callable[[], Iterable[Any]], words: Words, covers: Covers | None = None
    ):
        self._optimizers, self._words = optimizers, words
        named = [(name or type(module).__name__, inner) for name, inner in module.named_modules()]
        self._module_names, self._modules = [name for name, _ in named], [inner for _, inner in named]
        self._parameter_names = [name for name, _ in module.named_parameters()]
        self._parameters = list(module.parameters())
        self._untrained: Untrained | None = Untrained(covers, self._parameter_names, self._parameters)
        self._missed = NOTHING  # of all ranks, as it was reported last
        self._names_by_id = {id(p): name for name, p in module.named_parameters()}
        self._numbers = Numbers(module)
        self.autocast = Autocast()
        self._sizes: list[int] = []  # of the optimizers' groups, as ``_holdings`` found them
        self._holdings: Holdings = ()
        self._modes = self._trainable = b""
        self._looks: dict[int, _Look] = {}
        self._hashes: dict[str, tuple[Any, float]] = {}  # of what was hashed last
        self.draws: float | None = None
        self.objective = Objective()
        self._same_objective = SameObjective()
        self.differing: Mapping[str, Parts] = {}
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
        self._numbers.look()

    def before_forward(self) -> None:
        """Of a training forward: autocast; of the first one the generators as they are."""
        self.autocast.before_forward(self._parameters[0].device.type if self._parameters else "cpu")
        if self.draws is None:
            self._state = _generators()

    def after_forward(self) -> None:
        """The generators that were used are those whose state has changed."""
        self.autocast.after_forward()
        if self.draws is None and self._state:
            used = [before for before, now in zip(self._state, _generators(), strict=True) if before != now]
            self.draws, self._state = short_hash(used) if used else 0.0, ()

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
            hyper_parameters=self._hashed("hyper_parameters", (look.hyper_parameters, look.holdings)),
            device_hyper_parameters=on_device,
            training_modes=self._hashed("training_modes", look.modes),
            trainable=self._hashed("trainable", (look.trainable, look.missed) if any(look.missed) else look.trainable),
            settings=self._hashed("settings", look.settings),
            autocast=self._hashed("autocast", look.autocast) if look.autocast else 0.0,
            counters=look.counter % EXACT,
            first_draws=self.draws or 0.0,
            objective=self._hashed(OBJECTIVE, look.objective[1]) if look.objective[1] else 0.0,
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
        modes = flag_items("training mode", self._module_names, look.modes, ("trains", "in evaluation mode"))
        trainable = flag_items("trainable flags", self._parameter_names, look.trainable, ("trainable", "frozen"))
        held = holding_items(look.holdings, self._parameter_names)
        count = item_of("optimizer's step", "optimizer", f"{look.counter - 1:g}" if look.counter else "not known")
        autocast = item_of("autocast", "config", ", ".join(look.autocast) or "not known")
        missed = [
            item_of(f"parameters that nothing {does}", "parameters", ", ".join(names) or "none")
            for does, names in zip(("reduces", _TRAINS), look.missed, strict=True)
        ]
        text, structure, factor = look.objective
        numbers = () if self._same_objective.structural else (f"{factor:.6g}", text)
        own = repr((structure, numbers) if OBJECTIVE in self._asked else "")
        objective = [item_of("what backward begins with", OBJECTIVE, own, text or "not known")]
        of_modules = [*modes, *trainable, *missed, *self._numbers.items(look.settings)]
        return [*items, *on_device, *held, count, *of_modules, autocast, *objective]

    def _look(self) -> _Look:
        groups: list[tuple[Any, ...]] = []
        on_device: list[Tensor] = []
        optimizers = list(self._optimizers())
        counter = 0.0
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                groups.append(tuple(_plain(group.get(name), on_device) for name in HYPER_PARAMETERS))
            for count in counters_of(optimizer):
                if isinstance(count, Tensor):
                    on_device.append(count)
                else:
                    counter = max(counter, count + 1.0)
        sizes = [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        if sizes != self._sizes:
            self._sizes, self._holdings = sizes, holdings_of(groups_of(optimizers), self._names_by_id)
        missed = NOTHING if self._untrained is None else self._untrained.look(self._trainable)
        modes, settings, autocast = (self._modes, self._trainable), tuple(self._numbers.values), self.autocast.state
        own = self.objective
        objective = own.text, own.structure, own.factor
        return _Look(
            tuple(groups), self._holdings, tuple(on_device), counter, *modes, settings, autocast, missed, objective
        )

    def _hashed(self, kind: str, value: Any) -> float:
        known = self._hashes.get(kind)
        if known is None or known[0] != value:
            self._hashes[kind] = known = value, short_hash(value)
        return known[1]

    # -- of all ranks --------------------------------------------------------------------------------------------------

    def told_before(self, outcome: PreflightOutcome) -> None:
        """What the preflight has told is not told again while the same ranks differ."""
        for kind, group in _GROUPS.items():
            groups = _OF_PREFLIGHT.get(group, (group,))
            parts = {one.parts for one in outcome.wrong if one.item.group in groups}
            self._known[kind] = parts | {_EXTREMES} if parts else parts
        if any(one.item.group == "optimizer" for one in outcome.wrong):
            self._untrained = None  # what a rank's optimizer lacks is reported already

    def agree(
        self, arrived: Arrived, group: dist.ProcessGroup, device: torch.device, together: Together
    ) -> tuple[Unlike, ...]:
        """What the ranks do not do alike. Every rank calls it with the same observations, at the same step: where the
        ranks that differ are others than before, it is a collective that waits."""
        self._same_objective = together.decided(partial(self._same_objective.of, arrived.known))
        self.differing = together.decided(lambda: _differences(arrived.known, self._same_objective))
        news = together.decided(lambda: self._news(self.differing))
        if news is not None:
            self._known, self._asked, self._questions = news
            self._answer = unlike(_named(self._asked, arrived), arrived.step)
            if self._asked and self._questions <= MOST_QUESTIONS:
                items = together.alone(self.items, arrived.step) or []
                outcome = compare(items, group, device, together.once)
                found = events_of(outcome, arrived.step)
                told = _told(found, arrived.known, outcome.world_size)
                self._answer = told or self._answer
        self._missed = self._missed_by_all(arrived)
        return *self._answer, *reported(self._missed, arrived.step)

    def _missed_by_all(self, arrived: Arrived) -> Missed:
        """What is the same on all ranks; what differs is asked."""
        look, values = self._looks.get(arrived.step), arrived.known.code.trainable
        alike = bool((values == values[0]).all()) and bool((values != 0).all())
        return look.missed if look is not None and alike else NOTHING

    def _news(self, parts: Mapping[str, Parts]) -> _News | None:
        """What is known, asked, and how often, where other ranks differ than before; the same on every rank."""
        known = {kind: self._known.get(kind, set()) & {parts.get(kind, ())} for kind in _GROUPS}
        new = {kind: found for kind, found in parts.items() if found not in known[kind]}
        if new == self._asked:
            self._known = known
            return None
        return known, new, self._questions + bool(new)

    def unasked(self, arrived: Arrived) -> tuple[Unlike, ...]:
        """The same without asking, where the ranks do not come together any more; nothing where it is told already."""
        parts = _differences(arrived.known, self._same_objective.of(arrived.known))
        new = {kind: found for kind, found in parts.items() if found not in self._known.get(kind, ())}
        missed = self._missed_by_all(arrived)
        return (
            *(() if new == self._asked else unlike(_named(new, arrived), arrived.step)),
            *(() if missed == self._missed else reported(missed, arrived.step)),
        )

    def note(self, known: Gathered, ranks: int) -> Event | None:
        """Once: that the first forward drew the same random numbers on all ranks."""
        draws = known.code.first_draws
        if self._noted or len(draws) < 2 or not bool((draws > 0).all()):
            return None
        self._noted = True
        if not bool((draws == draws[0]).all()):
            return None
        return same_draws(known.step, ranks, self._words)


def same_draws(step: int, ranks: int, words: Words) -> Event:
    """The note that all ranks use the same masks."""
    message = (
        f"The first forward drew the same random numbers on all {ranks} ranks: dropout and other noise use "
        "the same masks on different rows, so that they average less than they could."
    )
    remedy = (
        "Nothing is wrong. If masks are to differ, seed each rank's generators with seed + rank once the model is "
        f"made; leave them alike where ranks must draw alike ({words.same_draws})."
    )
    return Event(step, "same-draws", "info", (), "first forward", None, None, message, remedy)


def _differences(known: Gathered, objective: SameObjective) -> dict[str, Parts]:
    found = {kind: parts for kind in KINDS if (parts := differing(known.code, kind))}
    return found if objective.parts is None else {**found, OBJECTIVE: objective.parts}


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
        group = _GROUPS[kind]
        shown = "; ".join(ranks_of(part) for part in ranks[:3])
        message = f"The {_WORDS[group]} differ between ranks: {shown}{'; …' if len(ranks) > 3 else ''}."
        odd = outvoted(ranks) or (tuple(sorted(sum(ranks, ()))) if group == OBJECTIVE else ())
        found[group, ranks] = _one(group, odd, _WORDS[group], message, step)
    return tuple(found.values())


def _one(group: str, odd: tuple[int, ...], where: str, message: str, step: int) -> Unlike:
    kind: EventKind = "objective-mismatch" if group == OBJECTIVE else "config-mismatch"
    return Unlike(f"unlike:{group}:{odd}", odd, where, message, _REMEDIES[group], step, kind)


def _told(events: Sequence[Event], known: Gathered, ranks: int) -> tuple[Unlike, ...]:
    found, lacks = [], any((event.where or "").startswith("optimizer's parameters") for event in events)
    for event in events:
        where = event.where or "parameters"
        if lacks and where == f"parameters that nothing {_TRAINS}":  # for that reason
            continue
        group = next((group for begin, group in _BEGINNINGS.items() if where.startswith(begin)), "optimizer")
        if event.kind == "objective-mismatch":
            message = _upper(event.message) + weighing(known, event.ranks, ranks)
            found.append(_one(OBJECTIVE, event.ranks or tuple(range(ranks)), "loss", message, event.step))
        else:
            found.append(_one(group, event.ranks, where, event.message, event.step))
    return tuple(found)


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def weighing(known: Gathered, odd: Sequence[int], ranks: int) -> str:
    """What the labels of the odd ranks and of another weigh, where that is known of each rank."""
    if known.ranks != ranks or not bool((known.objective.known > 0).all()):
        return ""
    other = next((rank for rank in range(ranks) if rank not in odd), None)
    weights = (known.objective.weight / known.loss.scale).tolist()
    if all(math.isclose(weight, weights[0], rel_tol=1e-3) for weight in weights):
        return ""
    shown = (*odd[:3], other) if odd and other is not None else range(min(ranks, 4))
    together = ", ".join(f"{weights[rank]:.4g} on rank {rank}" for rank in shown if rank is not None)
    return f" All labels of this step weigh together {together}."


def _generators() -> tuple[bytes, ...]:
    """States of torch's generators, which both live on the host; nothing where a device does not give its own."""
    try:
        return tuple(state.cpu().numpy().tobytes() for state in (torch.get_rng_state(), generator_state()))
    except Exception:  # a note is not worth an internal error
        return ()


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
