"""The alert functions of the trackers: Weights & Biases, MLflow, Trackio and Comet, each through its own library.

    send = run_of("wandb")       # on the training thread: the run that the script has begun there
    send(alert)                  # on another thread, or NotSent

The run is the script's: none is begun here, no library is imported that the script has not imported, and where there
is no run a sentence says so. MLflow's active run belongs to a thread and Trackio's to a context, so that they are
looked up where the script runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ds_silent.alerts.failure import NotSent
from ds_silent.alerts.message import Alert, plain_text
from ds_silent.destination import TRACKERS, Form

Send = Callable[[Alert], None]
LONGEST_TITLE = 63
"""Characters that W&B takes (wandb.sdk.wandb_run.Run.alert, 0.31: "less than 64 characters long")."""
LONGEST_TAG = 5_000
"""Characters that every backend of MLflow takes as a tag's value."""
_BEGIN = {"wandb": "wandb.init", "mlflow": "mlflow.start_run", "trackio": "trackio.init", "comet": "comet_ml.start"}


def run_of(form: Form) -> Send:
    """What sends to the run that is under way now; it raises NotSent where there is none."""
    module = sys.modules.get(TRACKERS[form])
    run = None if module is None else _FOUND[form](module)
    if run is None:
        why = f"no {form} run is under way on rank 0: call {_BEGIN[form]} before the training, or leave the alert out"
        return partial(_nobody, why)
    return partial(_SENDS[form], module, run)


def _nobody(why: str, alert: Alert) -> None:
    raise NotSent(why, again=False)


def _wandb(module: Any, run: Any, alert: Alert) -> None:
    level = {"info": "INFO", "warning": "WARN", "error": "ERROR"}[alert.level]
    run.alert(title=alert.title[:LONGEST_TITLE], text=plain_text(alert), level=level)


def _mlflow(module: Any, run: Any, alert: Alert) -> None:
    """It has no alerts: a tag that the list of runs can show and be searched by, and a point of a curve."""
    client = module.MlflowClient()
    client.set_tag(run.info.run_id, "silent.last_alert", f"{alert.title}\n{plain_text(alert)}"[:LONGEST_TAG])
    client.log_metric(run.info.run_id, f"silent/alerts/{alert.level}", 1.0, step=alert.step)


def _trackio(module: Any, run: Any, alert: Alert) -> None:
    level = {"info": "INFO", "warning": "WARN", "error": "ERROR"}[alert.level]
    run.alert(title=alert.title, text=plain_text(alert), level=getattr(module.AlertLevel, level))


def _comet(module: Any, run: Any, alert: Alert) -> None:
    """The notification is a mail, which only online experiments send; the text stays with the experiment."""
    run.log_text(f"{alert.title}\n{plain_text(alert)}", step=alert.step, metadata={"level": alert.level})
    run.send_notification(alert.title, status=alert.level, additional_data={"text": plain_text(alert)})


_FOUND: Mapping[str, Callable[[Any], Any]] = {
    "wandb": lambda wandb: wandb.run,
    "mlflow": lambda mlflow: mlflow.active_run(),
    "trackio": lambda trackio: trackio.context_vars.current_run.get(),
    "comet": lambda comet_ml: comet_ml.get_running_experiment(),
}
_SENDS: Mapping[str, Callable[[Any, Any, Alert], None]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
    "comet": _comet,
}
