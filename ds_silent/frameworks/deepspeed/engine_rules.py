"""Check how a script calls a DeepSpeed engine, and that what it gives it is what its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ds_silent.config.block_file import load_ds_config
from ds_silent.patches import Patches
from ds_silent.rules.known_optimizers import number
from ds_silent.rules.rule import Breach, Rule


class StepCalls(Rule):
    """Check that ``engine.step()`` follows every micro-batch: DeepSpeed counts them in it (0.16.9 to 0.19.8).

    Unless ``set_gradient_accumulation_boundary`` says where an accumulation ends, as accelerate and its Trainers do.

    Args:
        micro_batches: of the script's per step; a pipeline has one.
    """

    def __init__(self, engine: Any, micro_batches: int):
        self._engine, self._micro_batches = engine, micro_batches
        self._forwards = self._backwards = 0  # since the last call of step
        self._times = self._since = 0  # calls behind a whole accumulation, in a row; the step of the first

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Count the engine's calls."""
        if self._micro_batches == 1:
            return
        patches.hook(self._engine.register_forward_pre_hook, partial(safely, self._forward))
        patches.around(self._engine, "backward", partial(safely, self._backward))
        patches.around(self._engine, "step", partial(safely, self._step))

    def _forward(self, module: Any, args: Any) -> None:
        self._forwards += torch.is_grad_enabled()

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        self._backwards += 1

    def _step(self, *args: Any, **kwargs: Any) -> None:
        late = self._forwards == self._backwards == self._engine.gradient_accumulation_steps()
        by_script = getattr(self._engine, "_is_gradient_accumulation_boundary", None) is not None
        self._forwards = self._backwards = 0
        self._times = self._times + 1 if late and not by_script else 0
        if self._times == 1:
            self._since = int(self._engine.global_steps) + 1

    def breaches(self) -> tuple[Breach, ...]:
        micro_batches = self._engine.gradient_accumulation_steps()
        if self._times < max(1, micro_batches - 1):
            return ()
        message = (
            f"engine.step() is called once for {micro_batches} calls of engine.backward, and DeepSpeed counts "
            f"micro-batches in engine.step(): {micro_batches**2} of them make an update, and each is divided by "
            f"{micro_batches}."
        )
        remedy = (
            "Call engine.step() behind every engine.backward(): it updates the weights at the end of an accumulation, "
            "and only counts before."
        )
        effects = ("integrity",)  # what a reduction is given is no step's gradient
        return (Breach("steps", "objective-mismatch", "error", "engine.step", message, remedy, self._since, effects),)


class ConfigOptimizer(Rule):
    """Note an optimizer of the configuration that ``deepspeed.initialize`` was given another one for.

    DeepSpeed takes the one that it is given, and says so in its log alone (0.16.9 to 0.19.8).
    """

    def __init__(self, engine: Any, optimizers: Callable[[], Sequence[Any]]):
        self._engine, self._optimizers = engine, optimizers
        self._found: tuple[Breach, ...] | None = None

    def breaches(self) -> tuple[Breach, ...]:
        if self._found is None:
            self._found = tuple(self._look())
        return self._found

    def _look(self) -> Iterator[Breach]:
        config = load_ds_config(self._engine.config) if self._engine.config is not None else {}
        asked, optimizers = config.get("optimizer"), self._optimizers()
        if self._engine.client_optimizer is None or not isinstance(asked, Mapping) or len(optimizers) != 1:
            return
        groups = optimizers[0].param_groups
        others = [
            f"{name} {value:g}, where the optimizer has {', '.join(f'{own:g}' for own in owns)}"
            for name, value in (asked.get("params") or {}).items()
            if isinstance(value, (int, float))
            and (owns := sorted({own for group in groups if (own := _own(group, name)) is not None}))
            and value not in owns
        ]
        if others:
            message = (
                "The configuration's optimizer is not used, because deepspeed.initialize was given another one: the "
                f"configuration says {'; '.join(others)}."
            )
            remedy = "Take it out of the configuration, or give deepspeed.initialize no optimizer."
            yield Breach("optimizer", "update-mismatch", "info", "optimizer", message, remedy, 1)


def _own(group: Mapping[str, Any], name: str) -> float | None:
    """Return what a parameter group was made with: a scheduler changes its rate."""
    return number(group.get("initial_lr", group.get("lr")) if name == "lr" else group.get(name))
