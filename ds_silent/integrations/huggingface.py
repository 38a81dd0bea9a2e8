"""transformers' Trainer, observed by a callback: one line of a script.

    callback = SilentConsistencyCallback({"output_dir": "runs/my-run"})     # Trainer(..., callbacks=[callback])

What trains the model is known when the training begins: the model itself under ``fully_shard``, or the
DistributedDataParallel or DeepSpeedEngine around it, to which a callback is given no way. It is looked for among the
objects of the process, once. An engine around another model, such as DPO's reference, is left alone.

The observer's state travels in ``trainer_state.json``, where the Trainer keeps its callbacks' states, written by rank 0
and read by all ranks.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ds_silent.config import BLOCK
from ds_silent.config.block_file import without_auto
from ds_silent.extras import needs
from ds_silent.frameworks.attach import is_fsdp2
from ds_silent.frameworks.trainers import TRAINER
from ds_silent.integrations.callback_config import as_json, attach_once, go_on
from ds_silent.observing.observe import Given, told_in_a_sentence
from ds_silent.observing.observer import Observer

needs("ds_silent.integrations.huggingface", "huggingface")

from transformers import TrainerCallback  # noqa: E402 - behind the sentence that says what is missing
from transformers.trainer_callback import CallbackHandler, ExportableState  # noqa: E402

_KEPT = "kept"  # the attribute, and the key in trainer_state.json


class SilentConsistencyCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is not typed
    """Observes the training of a ``transformers.Trainer`` from its beginning to its end. On every rank.

    Under DeepSpeed the block of the ds_config goes before ``config``, which is for one that has none. A single process
    has nobody to be compared with: then one sentence says so, and the training goes on unobserved.

    ``"auto"`` in the ds_config's block, which accelerate would refuse because nothing fills it in, is the default.

    Args:
        config: the block as a dict, parsed, or the path of a file that holds it; by default all defaults.
        log: also put the numbers into the Trainer's own log, and so into whatever ``report_to`` names.

    Attributes:
        observer: of the training under way; None before, after, and where nothing is observed.

    Raises:
        ConfigError, SinkError: as the training begins, see :func:`ds_silent.initialize`; the same on every rank.
    """

    def __init__(self, config: Given = None, log: bool = False):
        self._config, self._logs = config, log
        self._logged = 0  # the newest step that the log has
        self.observer: Observer | None = None
        self.kept: dict[str, Any] | None = None  # the Trainer may write it, from a checkpoint

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fill in ``"auto"``: the Trainer is made, and accelerate reads the ds_config as the training begins."""
        ds_config: Any = getattr(getattr(args, "hf_deepspeed_config", None), "config", None)
        if isinstance(ds_config, dict) and isinstance(ds_config.get(BLOCK), dict):
            ds_config[BLOCK] = without_auto(ds_config[BLOCK])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach: the model is wrapped, and a checkpoint is loaded."""
        self._close()  # of a training that broke off, as where a Trainer looks for a batch size
        kept = _kept_in(state, type(self).__name__)
        with told_in_a_sentence():
            self.observer = self._observer(args, kwargs)
        if self._logs:
            self._go_before_the_others()
        if self.observer is not None and state.global_step:
            steps = int(state.global_step)  # every rank's own
            rows = steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
            go_on(self.observer, kept or {}, steps, rows)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the newest record's numbers, but those of single ranks and layers, to the training's own."""
        record = None if self.observer is None else self.observer.last_record
        if not self._logs or record is None or record.step == self._logged or not logs or "loss" not in logs:
            return
        self._logged = record.step
        assert self.observer is not None
        values = {tag: value for tag, value in self.observer.scalars.items() if not tag.startswith("silent/per_")}
        logs.update({tag: value for tag, value in values.items() if math.isfinite(value)})
        if state.log_history:
            state.log_history[-1].update(logs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that a checkpoint was written, by all ranks."""
        if self.observer is not None:
            self.observer.before_checkpoint()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close. Where a training breaks off, that happens as the process ends, or as the next one begins."""
        self._close()

    def state(self) -> dict[str, Any]:
        """Return what the Trainer keeps in a checkpoint; it asks on rank 0."""
        kept = None if self.observer is None or self.observer.closed else self.observer.state_dict()
        return {"args": {"config": as_json(self._config)}, "attributes": {_KEPT: kept}}

    def _observer(self, args: Any, kwargs: Mapping[str, Any]) -> Observer | None:
        held = training_of(kwargs["model"])
        return attach_once(
            kwargs["model"] if held is None else held,
            self._config,
            "torchrun or accelerate launch on two processes or more",
            optimizer=kwargs.get("optimizer"),
            loader=kwargs.get("train_dataloader"),
            accumulation=args.gradient_accumulation_steps,
            promise=TRAINER,
        )

    def _go_before_the_others(self) -> None:
        """Move to the front: those that report come first, and we would be too late."""
        for handler in gc.get_objects():
            if issubclass(type(handler), CallbackHandler) and any(one is self for one in handler.callbacks):
                handler.callbacks.remove(self)
                handler.callbacks.insert(0, self)

    def _close(self) -> None:
        if self.observer is not None:
            self.observer.close()
            self.observer = None


def training_of(model: Any) -> Any:
    """Find what trains ``model`` data-parallel: itself where it is wrapped or under ``fully_shard``, else its wrapper.

    None where nothing does. Two wrap the same model where a Trainer has begun anew: the garbage goes first.
    """
    kinds: tuple[type, ...] = (DistributedDataParallel,)
    if "deepspeed" in sys.modules:
        kinds += (sys.modules["deepspeed"].DeepSpeedEngine,)
    if issubclass(type(model), kinds) or is_fsdp2(model):
        return model
    found = _around(model, kinds)
    if len(found) > 1:
        del found
        gc.collect()
        found = _around(model, kinds)
    return found[-1] if found else None


def _around(model: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Find by ``type``: ``isinstance`` asks an object for its ``__class__``, and a lazy one would load something."""
    wrappers = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    return [one for one in wrappers if getattr(one, "module", None) is model]


def _kept_in(state: Any, name: str) -> dict[str, Any] | None:
    """Return the observer's state in a checkpoint's TrainerState; make the place where the next one is written.

    A checkpoint of an unobserved training has none, and the Trainer asks for it.
    """
    held = state.stateful_callbacks.setdefault(name, {})
    first = held[0] if isinstance(held, list) and held else held
    found = first.get("attributes", {}).get(_KEPT) if isinstance(first, Mapping) else None
    return found if isinstance(found, dict) else None
