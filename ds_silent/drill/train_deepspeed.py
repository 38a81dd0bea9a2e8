"""Train under DeepSpeed, and reach between its reduction's input and output, and around the update.

    with EngineHooks(engine, injection) as hooks:
        with hooks.backward(step, micro_batch, last=True):
            engine.backward(loss)
        with hooks.update():
            engine.step()

Foreign functions, as DeepSpeed 0.16.9 and 0.19.8 have them. ``deepspeed.comm.all_reduce`` and ``reduce`` are what
``DeepSpeedEngine.allreduce_bucket`` (stage 0) and ``DeepSpeedZeroOptimizer`` (stages 1 and 2) look up at each call, and
during a backward they reduce gradients only; ``deepspeed.comm.all_gather_into_tensor`` collects the updated weights in
``all_gather_dp_groups``. The observer communicates through ``torch.distributed`` and is not touched. Everything is put
back on exit.

Responses run inside ``engine.step()``. A reduction that is repeated goes through
``DeepSpeedEngine.buffered_allreduce_fallback`` (stage 0) or ``DeepSpeedZeroOptimizer.reduce_gradients`` (stage 1), by
which it is told from DeepSpeed's other collectives there; it runs clean unless the injection says otherwise. An ordered
reduction uses ``all_to_all_single``.

Of the user's ds_config (:func:`ds_config_of`) the ``silent_consistency`` block, ZeRO, the dtype, clipping, accumulation
and the micro-batch are kept. The optimizer is the drill's own: a learning rate that suits another model would tear the
practice model apart. Monitors and the like would write where the user does not expect it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import deepspeed.comm
import torch.distributed as dist
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError
from torch import Tensor

import ds_silent
from ds_silent.config import BLOCK, ConfigError
from ds_silent.config.block_file import section
from ds_silent.drill.faults.injection import Batch, Injection
from ds_silent.drill.training import LARGEST_BUCKET, LEARNING_RATE, WEIGHT_DECAY, DrillTraining, Hooks, Script
from ds_silent.observing.observer import Observer
from ds_silent.patches import Patches

if TYPE_CHECKING:
    from ds_silent.drill.setting import DrillSetting


class EngineHooks(Hooks):
    """The patches of one engine on this rank; nothing is patched where the injection changes nothing."""

    def __init__(self, engine: Any, injection: Injection) -> None:
        super().__init__(injection)
        self._engine = engine

    def __enter__(self) -> EngineHooks:
        injection, patches = self.injection, self.patches
        if injection.reduction is not None or injection.repetition is not None:
            for name in ("all_reduce", "reduce"):
                places = {"backward": "reduction", "repetition": "repetition"}
                patches.wrap(deepspeed.comm, name, partial(self._run, places))
        if injection.repetition is not None:
            patches.wrap(self._engine, "buffered_allreduce_fallback", self._repeat)
            if hasattr(self._engine.optimizer, "reduce_gradients"):
                patches.wrap(self._engine.optimizer, "reduce_gradients", self._repeat)
        if injection.pieces is not None:
            patches.wrap(dist, "all_to_all_single", partial(self._run, {"backward": "pieces"}))
        if injection.gathering is not None:
            patches.wrap(deepspeed.comm, "all_gather_into_tensor", partial(self._run, {"update": "gathering"}))
        if injection.update is not None or injection.updated is not None:
            patches.wrap(self._engine.basic_optimizer, "step", self._apply)
        return self

    def __exit__(self, *error: object) -> None:
        self.patches.undo()

    @contextmanager
    def backward(self, step: int, micro_batch: int, last: bool) -> Iterator[None]:
        """Surround ``engine.backward`` of one micro-batch, counted from 0."""
        self.begin(step, micro_batch, last)
        self.phase = "backward"
        yield
        self.phase = "step"

    @contextmanager
    def update(self) -> Iterator[None]:
        """Surround ``engine.step``."""
        self.phase = "update"
        yield
        self.phase = "step"

    def _repeat(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.phase != "update":
            return original(*args, **kwargs)
        self._buckets, self.attempt, self.phase = 0, self.attempt + 1, "repetition"
        result = original(*args, **kwargs)
        self.phase = "update"
        return result

    def _run(
        self, places: Mapping[str, str], original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Let the injection act at the place of ``places`` that the training's phase is."""
        place = places.get(self.phase or "")
        if place is None or getattr(self.injection, place) is None:
            return original(tensor, *args, **kwargs)
        self.collective(place, tensor, partial(original, tensor, *args, **kwargs))
        return None

    def _apply(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = self._engine.basic_optimizer
        result = self.act("update", optimizer, partial(original, *args, **kwargs), self.step)
        self.act("updated", self._engine.module, optimizer, self.step)
        return result


class DeepSpeedTraining(DrillTraining):
    """Under DeepSpeed."""

    hooks: EngineHooks

    def __init__(self, setting: DrillSetting, script: Script) -> None:
        config = copy.deepcopy(setting.config)
        config[BLOCK]["output_dir"] = str(script.output_dir)
        if script.injection.config is not None:
            config = script.injection.config(config)
        model = script.model()
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=script.groups(model), config=config)
        hooks = EngineHooks(self.engine, script.injection)
        super().__init__(setting, script, hooks, self.engine.module, self.engine.basic_optimizer)

    def reach_below(self) -> None:
        if self.hooks.injection.left_out is not None:
            _leave_out(self.engine, self.hooks)
        if self.hooks.injection.kept is not None:
            _keep_gradients(self.engine, self.hooks)

    def reach_behind(self) -> None:
        self.hooks.__enter__()
        super().reach_behind()

    def attach(self, block: dict[str, Any]) -> Observer | None:
        self.engine.training_dataloader = self.script.loader
        ds_silent.attach(self.engine)  # its configuration has the block
        return ds_silent.observer_of(self.engine)

    def train(self, batch: Batch, count: int) -> Tensor:
        hooks, engine = self.hooks, self.engine
        loss: Tensor = hooks.act("loss", engine(batch.tokens, batch.labels), hooks.step)
        with hooks.backward(hooks.step, hooks.micro_batch, hooks.last):
            engine.backward(loss)
        with hooks.update():
            engine.step()
        return loss

    def close(self) -> None:
        self.engine.destroy()


def _leave_out(engine: Any, hooks: Hooks) -> None:
    """Let some parameters take no part in the reduction: each rank goes on with its own gradient.

    Stage 0 (and ``BF16_Optimizer``, which has buffers of its own and is not reached): the list that
    ``DeepSpeedEngine._get_gradients_for_reduction`` makes. Stages 1 and 2:
    ``DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads``, called once per parameter.
    """
    patches = Patches()  # on this engine, which ends with the training

    def left() -> list[Any]:
        named = engine.module.named_parameters()
        return [parameter for name, parameter in named if hooks.act("left_out", name, hooks.step)]

    def without(original: Callable[..., Any]) -> Any:
        dense, experts = original()
        held = {parameter.grad.data_ptr() for parameter in left() if parameter.grad is not None}
        return [gradient for gradient in dense if gradient.data_ptr() not in held], experts

    def skip(original: Callable[..., Any], reduced: Any, *args: Any, **kwargs: Any) -> Any:
        out = any(reduced is parameter for parameter in left())
        return None if out else original(reduced, *args, **kwargs)

    if engine.zero_optimization_stage() == 0:
        patches.wrap(engine, "_get_gradients_for_reduction", without)
    else:
        patches.wrap(engine.optimizer, "reduce_independent_p_g_buckets_and_remove_grads", skip)


def _keep_gradients(engine: Any, hooks: Hooks) -> None:
    """Let ``zero_grad`` forget its work: of the engine (stage 0 in fp32) or of its optimizer wrapper (in bf16)."""
    patches = Patches()

    def forgetful(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if hooks.act("kept", hooks.step) else original(*args, **kwargs)

    for owner in {id(owner): owner for owner in (engine, engine.optimizer)}.values():
        patches.wrap(owner, "zero_grad", forgetful)


# -- the configuration -------------------------------------------------------------------------------------------------

KEPT = (
    "zero_optimization",
    "bf16",
    "data_types",
    "gradient_clipping",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
)
# Read, replaced, or without meaning for numbers: no reason to speak of them.
SILENT = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"),
    *("fp16", "steps_per_print", "wall_clock_breakdown", "tensorboard", "wandb", "csv_monitor", "comet", BLOCK),
)


def ds_config_of(
    given: Mapping[str, Any], ranks: int, micro_batch: int, accumulation: int, stage: int | None, dtype: str | None
) -> tuple[dict[str, Any], str, list[str]]:
    """Return the ds_config without a block, the dtype, and what was changed; arguments as of ``make_setting``.

    Raises:
        ConfigError: DeepSpeed would refuse it.
    """
    notes = [f"{key}: not part of the drill" for key in given if key not in (*KEPT, *SILENT)]
    config = {key: given[key] for key in KEPT if key in given and given[key] != "auto"}
    zero, dropped = _zero(section(given, "zero_optimization"), stage)
    dtype, note = _dtype(given, dtype)
    config |= {
        "zero_optimization": zero,
        "bf16": {**section(given, "bf16"), "enabled": dtype == "bf16"},
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch * accumulation * ranks,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "torch_adam": True},
        },
        "steps_per_print": 10**9,
    }
    return config, dtype, [*notes, *dropped, *note]


def _zero(zero: Mapping[str, Any], stage: int | None) -> tuple[dict[str, Any], list[str]]:
    """Leave out "auto", offloading (which needs compilers and moves no number) and buckets of a large model's size."""
    offloaded = [key for key in zero if "offload" in key]
    kept: dict[str, Any] = {k: v for k, v in zero.items() if v != "auto" and k not in offloaded}
    for key, value in kept.items():
        if key.endswith("_bucket_size") and isinstance(value, (int, float)):
            kept[key] = min(int(value), LARGEST_BUCKET)
    kept.setdefault("reduce_bucket_size", LARGEST_BUCKET)
    kept["stage"] = kept.get("stage", 0) if stage is None else stage
    if kept["stage"] not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {kept['stage']!a}")
    try:
        DeepSpeedZeroConfig(**kept)  # or each rank would find it out, minutes later
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("zero_optimization", *first["loc"])))
        raise ConfigError(f"DeepSpeed refuses {key!a}: {first['msg']!a}; correct it in the ds_config") from None
    return kept, [f"zero_optimization.{key}: not part of the drill" for key in offloaded]


def _dtype(given: Mapping[str, Any], asked: str | None) -> tuple[str, list[str]]:
    if asked is not None:
        return asked, []
    if section(given, "fp16").get("enabled") is True:
        return "bf16", ["fp16: computed in bf16, because DeepSpeed has no fp16 on the CPU"]
    return ("bf16" if section(given, "bf16").get("enabled") is True else "fp32"), []
