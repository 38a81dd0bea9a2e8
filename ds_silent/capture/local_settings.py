"""Read what this rank trains with: hyper-parameters, optimizers, modes, modules, autocast, loss.

    local = LocalSettings(module, optimizers, framework)
    local.look_at_modes()          # at the first gradient of a measured step
    local.code(step)               # hashes, between the reduction and the optimizer
    local.items(step, ...)         # what ranks compare when their hashes differ

Modes are read when gradients come, not in the forward: an evaluation between two steps leaves no trace, and a rank that
trains in evaluation mode cannot hide.

A new setting needs a line in :class:`_Look`, :meth:`LocalSettings.code` and :meth:`LocalSettings.items`, a field of
:class:`ds_silent.exchange.observation.Code`, and a place in ``GROUPS`` of :mod:`ds_silent.capture.settings_check`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_silent.capture.deals import Deal
from ds_silent.capture.objective import LocalObjective
from ds_silent.capture.untrained import NOTHING, Missed, Untrained
from ds_silent.device import generator_state
from ds_silent.exchange.observation import Code
from ds_silent.framework import Framework, StepCounts
from ds_silent.maths.fingerprint import short_hash
from ds_silent.patches import Patches
from ds_silent.patches.script_hooks import ScriptHooks
from ds_silent.preflight.items import HOOKS, SUBSET, Item, item_of
from ds_silent.preflight.settings import (
    Holdings,
    Numbers,
    counters_of,
    flag_items,
    groups_of,
    groups_with,
    holding_items,
    holdings_of,
    hook_items,
    joined,
)

OBJECTIVE: Literal["objective"] = "objective"
PICKED: Literal["picked"] = "picked"
TRAINS = "trains"
LABELS = "what each label is"
INPUTS: Literal["loss_inputs"] = "loss_inputs"
SCALES = "scale of the loss's inputs"
HYPER_PARAMETERS = {
    "lr": "learning rate",
    "weight_decay": "weight decay",
    "betas": "betas",
    "momentum": "momentum",
    **{name: name for name in ("eps", "alpha", "rho", "dampening", "nesterov", "amsgrad", "maximize", "max_grad_norm")},
}
"""Entries of param_groups that all ranks must share. Others may be an optimizer's own state, of its shard."""
EXACT = 1 << 24  # whole numbers below it are exact in fp32
_REMEMBERED = 4  # measured steps; an observation is read one or two steps later
_ON_DEVICE = "on the device"
_TRAINING, _TRAINABLE = attrgetter("training"), attrgetter("requires_grad")


@dataclass(frozen=True)
class _Look:
    """Hold this rank's settings at one step."""

    hyper_parameters: tuple[tuple[Any, ...], ...]  # by parameter group, in the order of HYPER_PARAMETERS
    holdings: Holdings
    on_device: tuple[Tensor, ...]
    counter: float  # the optimizers' largest, plus 1; 0 if they count on a device or not at all
    modes: bytes  # one per module
    trainable: bytes  # one per parameter
    settings: tuple[list[Any], ...]  # of modules
    autocast: tuple[str, ...]
    missed: Missed  # trainable parameters
    objective: tuple[str, Any, float] = ("", (), 0.0)  # text for people, structure, factor
    labels: str = ""  # where they come from
    picked: str = ""  # rows of the data set, where a sampler deals each rank a share of them
    inputs: str = ""  # the script's own numbers in what the losses are made of


class LocalSettings:
    """Follow one rank's settings.

    Args:
        optimizers: the torch optimizers that step, read anew each time.
        framework: knows which gradients are reduced and which parameters optimizers hold; None if nothing does.
    """

    def __init__(self, module: nn.Module, optimizers: Callable[[], Iterable[Any]], framework: Framework | None = None):
        self._optimizers = optimizers
        self._hooks = ScriptHooks() if framework is None else framework.script_hooks
        self._counts = StepCounts() if framework is None else framework.counts
        self._module, self._framework = module, framework
        named = [(name or type(module).__name__, inner) for name, inner in module.named_modules()]
        self._module_names, self._modules = [name for name, _ in named], [inner for _, inner in named]
        self._untrained: Untrained | None = None
        self._take_parameters(dict(module.named_parameters()))
        self._numbers = Numbers(module)
        self.autocast = Autocast()
        self._measured = 0  # steps
        self._own: list[int] = []  # places of the groups that hold parameters of the model
        self._modes = self._trainable = b""
        self._looks: dict[int, _Look] = {}
        self._hashes: dict[str, tuple[Any, float]] = {}  # the newest value of each, and its hash
        self.draws: float | None = None  # hash of the generators that the first training forward drew from; 0: of none
        self.objective = LocalObjective(module)  # what this rank's backwards begin with
        self._state: tuple[bytes, ...] = ()
        self.deal: Callable[[], Deal] = Deal  # how the rows come to this rank

    def _take_parameters(self, named: dict[str, nn.Parameter]) -> None:
        self._parameter_names, self._parameters = list(named), list(named.values())
        holders = [inner._parameters for inner in self._module.modules()]
        places = {id(one): (holder, key) for holder in holders for key, one in holder.items()}
        held = [places[id(parameter)] for parameter in self._parameters]
        self._holders, self._keys = [holder for holder, _ in held], [key for _, key in held]
        self._names_by_id = {id(parameter): name for name, parameter in named.items()}
        self._untrained = Untrained(self._framework, self._parameter_names, self._parameters)
        self._sizes: list[int] = []  # of the optimizers' groups when ``_holdings`` was read
        self._holdings: Holdings = ()

    def _look_for_new_parameters(self) -> None:
        """Take those that the script has put in the place of others, or beside them, since the last look.

        There is one at the steps 1, 2, 4, 8, ... of those that are measured, and at each whether the known ones are in
        their places; none where a forward swaps parameters.
        """
        self._measured += 1
        if getattr(self._framework, "weights_sharded", False) or self._untrained is None:
            return
        there = all(map(is_, map(dict.get, self._holders, self._keys), self._parameters))
        if there and self._measured & (self._measured - 1):
            return
        named = dict(self._module.named_parameters())
        if not there or len(named) != len(self._parameters):
            self._take_parameters(named)

    def ignore_untrained(self) -> None:
        """Stop looking for parameters that nothing trains: they are reported already."""
        self._untrained = None

    def missed_at(self, step: int) -> Missed:
        """Return the parameters that nothing reduces or trains here; nothing if ``step`` is forgotten."""
        look = self._looks.get(step)
        return NOTHING if look is None else look.missed

    def look_at_modes(self) -> None:
        """Read the modes while gradients come. 10,000 modules of one parameter each take 2 ms."""
        self._modes = bytes(map(_TRAINING, self._modules))
        self._trainable = bytes(map(_TRAINABLE, self._parameters))
        self._numbers.look()

    def before_forward(self) -> None:
        """Note autocast when a training forward begins, and the generators before the first."""
        self.autocast.before_forward(self._parameters[0].device.type if self._parameters else "cpu")
        if self.draws is None:
            self._state = _generators()

    def after_forward(self) -> None:
        """Find the generators that were used, whose state has changed."""
        self.autocast.after_forward()
        if self.draws is None and self._state:
            used = [before for before, now in zip(self._state, _generators(), strict=True) if before != now]
            self.draws, self._state = short_hash(used) if used else 0.0, ()

    def code(self, step: int) -> Code[float | Tensor]:
        """Hash the settings of ``step``, between its reduction and its optimizer, without waiting for a device.

        Where the script clears the gradient and leaves the step out, its scheduler has set the next step's rate by now:
        the hyper-parameters are not known.
        """
        if not self._modes:
            self.look_at_modes()
        self._look_for_new_parameters()
        self.objective.measured(step)
        look = self._look()
        self._looks.pop(step, None)  # a step that is taken again is the newest
        self._looks[step] = look
        while len(self._looks) > _REMEMBERED:
            del self._looks[next(iter(self._looks))]
        on_device: float | Tensor = 0.0
        known = not self._counts.left_out
        if look.on_device and known:
            values = torch.stack([value.detach().float().reshape(()) for value in look.on_device])
            on_device = (values * torch.arange(1, 1 + len(values), device=values.device)).sum()
            on_device = on_device.nan_to_num(nan=-1.0)  # NaN never equals NaN
        return Code(
            hyper_parameters=self._hashed("hyper_parameters", (look.hyper_parameters, look.holdings)) if known else 0.0,
            device_hyper_parameters=on_device,
            training_modes=self._hashed("training_modes", look.modes),
            trainable=self._hashed("trainable", (look.trainable, look.missed) if any(look.missed) else look.trainable),
            settings=self._hashed("settings", look.settings),
            autocast=self._hashed("autocast", look.autocast) if look.autocast else 0.0,
            counters=look.counter % EXACT,
            first_draws=self.draws or 0.0,
            objective=self._hashed(OBJECTIVE, look.objective[1]) if look.objective[1] else 0.0,
            loss_inputs=self._hashed(INPUTS, look.inputs) if look.inputs else 0.0,
            label_places=self.objective.places.code,
            picked=self._hashed(PICKED, look.picked) if look.picked else 0.0,
            hooks=self._hashed(HOOKS, sorted(self._hooks.changed)),
        )

    def items(self, step: int, kinds: Container[str], structural: bool) -> list[Item]:
        """Return the items to compare when ranks differ, as they were at ``step``; equally many on every rank.

        Args:
            kinds: what differs: objectives are compared, where labels come from, and subsets, only if they are in it,
                as some ranks know them later than others.
            structural: whether objectives differ in more than numbers.
        """
        look = self._looks.get(step) or self._look()

        def of_groups(column: int) -> Callable[[], str]:
            return lambda: joined([group[column] for group in look.hyper_parameters if group[column] is not None])

        items = [item_of(name, "optimizer", of_groups(column)) for column, name in enumerate(HYPER_PARAMETERS.values())]
        on_device = [item_of("hyper-parameters on the device", "optimizer", lambda: _listed(look.on_device))]
        modes = flag_items("training mode", self._module_names, look.modes, ("trains", "in evaluation mode"))
        trainable = flag_items("trainable flags", self._parameter_names, look.trainable, ("trainable", "frozen"))
        held = holding_items(look.holdings, self._parameter_names)
        count = item_of("optimizer's step", "optimizer", f"{look.counter - 1:g}" if look.counter else "not known")
        autocast = item_of("autocast", "config", ", ".join(look.autocast) or "not known")
        missed = [
            item_of(f"parameters that nothing {does}", "parameters", ", ".join(names) or "none")
            for does, names in zip(("reduces", TRAINS), look.missed[:2], strict=True)
        ]
        text, structure, factor = look.objective
        numbers = () if structural else (f"{factor:.6g}", text)
        own = repr((structure, numbers) if OBJECTIVE in kinds else "")
        objective = [
            item_of("what backward begins with", OBJECTIVE, own, text or "not known"),
            item_of(SCALES, OBJECTIVE, look.inputs if INPUTS in kinds else ""),
            item_of(LABELS, OBJECTIVE, look.labels if "label_places" in kinds else ""),
            item_of(SUBSET, "sampler", look.picked if PICKED in kinds else ""),
            *(hook_items(self._hooks.changed, self._hooks.names) if "hooks" in kinds else hook_items({}, ())),
        ]
        of_modules = [*modes, *trainable, *missed, *self._numbers.items(look.settings)]
        return [*items, *on_device, *held, count, *of_modules, autocast, *objective]

    def _look(self) -> _Look:
        on_device: list[Tensor] = []
        optimizers = list(self._optimizers())
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            self._sizes, self._holdings = sizes, holdings_of(groups_of(optimizers), self._names_by_id)
            own = set(map(id, groups_with(groups, self._names_by_id)))
            self._own = [place for place, group in enumerate(groups) if id(group) in own]
        own_groups = [groups[place] for place in self._own]
        hyper_parameters = [tuple(_plain(one.get(name), on_device) for name in HYPER_PARAMETERS) for one in own_groups]
        counter = 0.0
        for count in [count for optimizer in optimizers for count in counters_of(optimizer)]:
            if isinstance(count, Tensor):
                on_device.append(count)
            else:
                counter = max(counter, count + 1.0)
        missed = NOTHING if self._untrained is None else self._untrained.look(self._trainable)
        modes, settings, autocast = (self._modes, self._trainable), tuple(self._numbers.values), self.autocast.state
        known = self.objective
        objective = known.text, known.structure, known.factor
        numbers = tuple(on_device), counter, *modes, settings, autocast, missed
        return _Look(
            tuple(hyper_parameters),
            self._holdings,
            *numbers,
            objective,
            known.places.text,
            self.deal().picked,
            inputs=known.inputs,
        )

    def _hashed(self, kind: str, value: Any) -> float:
        known = self._hashes.get(kind)
        if known is None or known[0] != value:
            self._hashes[kind] = known = value, short_hash(value)
        return known[1]


def _generators() -> tuple[bytes, ...]:
    """Return the states of torch's generators, both on the host; nothing if a device hides its state."""
    try:
        return tuple(state.cpu().numpy().tobytes() for state in (torch.get_rng_state(), generator_state()))
    except Exception:  # the note is not worth an internal error
        return ()


def _plain(value: Any, on_device: list[Tensor]) -> Any:
    """Return a copy that compares by value. Device tensors are kept apart: reading one would wait."""
    if isinstance(value, Tensor):
        if value.device.type == "cpu":
            return value.tolist()
        if value.numel() == 1:
            on_device.append(value)
        return _ON_DEVICE
    if isinstance(value, (list, tuple)):
        return tuple(_plain(inner, on_device) for inner in value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _listed(values: Sequence[Tensor]) -> str:
    return ", ".join(str(float(value)) for value in values) or "none"


# -- autocast ----------------------------------------------------------------------------------------------------------

_TRACES = "_enter_autocast"
"""Of torch.amp.autocast_mode (2.4 to 2.13): torch.compile calls it, also from its compiled code."""


class Autocast:
    """Follow the autocast of one rank's training forwards: on or off, and the dtype.

    A script enters autocast around the forward, so it is on when the forward begins. A trainer or model may enter it
    inside: then the first entry that switches it on counts, because a later one may depend on the rows. In a compiled
    model only tracing enters it, again whenever shapes change: then only the state when the forward begins counts.
    """

    def __init__(self) -> None:
        self._device = ""  # of the current forward; empty outside
        self._found: dict[str, None] = {}
        self._now: str | None = None
        self._last: tuple[str, ...] = ()
        self._traced = False

    @property
    def state(self) -> tuple[str, ...]:
        """Return all states of the forwards since the last call, sorted; without a forward, the earlier ones."""
        if self._found:
            self._last, self._found = tuple(sorted(self._found)), {}
        return self._last

    def connect(self, patches: Patches, local: Callable[..., object]) -> None:
        """Listen to every entry; ``local``: the guard of :mod:`ds_silent.distributed.guard`."""
        patches.behind_method(torch.autocast, "__enter__", partial(local, self._entered))

    def before_forward(self, device: str) -> None:
        """Note that a training forward on this type of device begins."""
        self._device, self._now = device, _autocast_of(device)

    def after_forward(self) -> None:
        """Note that the forward has ended."""
        if self._device:
            self._found[self._now or "off"] = None
            self._device = ""

    def _entered(self, caller: str) -> None:
        self._traced = self._traced or caller == _TRACES
        if self._device and self._now is None and not self._traced:
            self._now = _autocast_of(self._device)


def _autocast_of(device: str) -> str | None:
    """Return autocast's dtype; None if it is off or this device type has none."""
    try:
        enabled = torch.is_autocast_enabled(device)
        return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if enabled else None
    except RuntimeError:
        return None
