"""Lightning's Trainer, observed by a callback: one line of a script.

    callback = SilentConsistencyCallback({"output_dir": "runs/my-run"})     # Trainer(..., callbacks=[callback])

``lightning.pytorch`` and ``pytorch_lightning`` alike. Without any line: :mod:`ds_silent.integrations.lightning_entry`.

The observer's state is the callback's state in Lightning's checkpoints.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ds_silent.extras import needs
from ds_silent.frameworks.attach import is_fsdp2
from ds_silent.frameworks.trainers import promise_of_lightning
from ds_silent.integrations.callback_config import attach_once, go_on
from ds_silent.observing.observe import Given, told_in_a_sentence
from ds_silent.observing.observer import Observer
from ds_silent.preflight.inventory import rows_per_batch


def _callback_type() -> Any:
    """Return that of the package that the script has imported: each has its own, with the same methods."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        if hasattr(sys.modules.get(package), "Callback"):
            return sys.modules[package].Callback
    needs("ds_silent.integrations.lightning", "lightning")
    from lightning.pytorch import Callback

    return Callback


class SilentConsistencyCallback(_callback_type()):  # type: ignore[misc]  # one of two
    """Observes the training of a Lightning ``Trainer`` from its beginning to its end. On every rank.

    Under DeepSpeed the block of the ds_config goes before ``config``, which is for one that has none. A single process
    has nobody to be compared with: then one sentence says so, and the training goes on unobserved.

    Args:
        config: the block as a dict, parsed, or the path of a file that holds it; by default all defaults.
        log: also give the numbers to the Trainer's loggers, every ``log_every_n_steps``.

    Attributes:
        observer: of the training under way; None before, after, and where nothing is observed.

    Raises:
        ConfigError, SinkError: as the training begins, see :func:`ds_silent.initialize`; the same on every rank.
    """

    observes_consistency = True

    def __init__(self, config: Given = None, log: bool = False):
        self._config, self._logs = config, log
        self.observer: Observer | None = None
        self._kept: dict[str, Any] = {}  # of the checkpoint that the training goes on from
        self._logged = 0  # the newest step that the loggers know

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: the model is wrapped, and a checkpoint is loaded."""
        self._close()  # of a training that broke off
        kept, self._kept = self._kept, {}
        with told_in_a_sentence():
            self.observer = self._observer(trainer)
        if self.observer is not None and trainer.global_step:
            steps = int(trainer.global_step)
            rows = steps * (rows_per_batch(_loader_of(trainer)) or 0) * int(trainer.accumulate_grad_batches)
            go_on(self.observer, kept, steps, rows)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Give the newest record to the loggers, if they are to have it."""
        if not self._logs or self.observer is None or trainer.global_step % trainer.log_every_n_steps:
            return
        record = self.observer.last_record
        if record is not None and record.step != self._logged:
            self._logged = record.step
            values = {tag: value for tag, value in self.observer.scalars.items() if math.isfinite(value)}
            for logger in trainer.loggers:
                logger.log_metrics(values, record.step)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Note that a checkpoint is being written, by all ranks."""
        if self.observer is not None:
            self.observer.before_checkpoint()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close. Lightning makes an exit of a Ctrl-C, which by the end of the process nobody can tell from another."""
        self._close(exception)

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning keeps in a checkpoint, of rank 0."""
        return {} if self.observer is None or self.observer.closed else self.observer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint, before the training begins."""
        self._kept = dict(state_dict)

    def _observer(self, trainer: Any) -> Observer | None:
        return attach_once(
            training_of(trainer.strategy.model),
            self._config,
            "Trainer(devices=...) or torchrun on two processes or more",
            optimizer=list(trainer.optimizers),
            loader=_loader_of(trainer),
            accumulation=int(trainer.accumulate_grad_batches),
            promise=promise_of_lightning(trainer),
        )

    def _close(self, error: BaseException | None = None) -> None:
        if self.observer is not None:
            self.observer.close(error)
            self.observer = None


def training_of(model: nn.Module) -> nn.Module:
    """Find what trains the model data-parallel: a strategy's own model, or its one part under ``fully_shard``."""
    if isinstance(model, DistributedDataParallel) or is_fsdp2(model):
        return model
    outermost = [part for part in model.children() if is_fsdp2(part)]
    inside = {id(parameter) for part in outermost for parameter in part.parameters()}
    whole = all(id(parameter) in inside for parameter in model.parameters() if parameter.requires_grad)
    return outermost[0] if len(outermost) == 1 and whole else model


def _loader_of(trainer: Any) -> Any:
    """Return the loader; several at once, or anything else that gives batches, are followed by what they give."""
    loader = trainer.train_dataloader
    return loader if isinstance(loader, DataLoader) else None
