"""DeepSpeed logs the configuration that it is given; the addresses of the alerts are not in that log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ds_silent.config.destination import masked_in_log
from tests.support.distributed import run_distributed

SECRET = "s3cr3t-T0k3n"


def test_a_log_without_addresses(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("somebody")
    alerts: list[Any] = [
        {"to": f"https://example.org/{SECRET}", "level": "warning"},
        {"to": f"https://example.org/{SECRET}/more"},
        {"to": f'command:page "{SECRET} x"'},
        {"too": f"nonsense {SECRET}"},
        {"to": "env:PAGER"},
    ]
    with caplog.at_level(logging.INFO), masked_in_log(logger, {"alerts": alerts}):
        logger.info("json = %s", json.dumps(alerts))
        logger.info("as it is: %s", alerts)
        logger.info("100 % plain")
    logger.info("afterwards, %s", SECRET)
    assert SECRET not in "".join(record.getMessage() for record in caplog.records[:-1])
    assert '"to": "https://example.org/…", "level": "warning"' in caplog.records[0].getMessage()
    assert "env:PAGER" in caplog.records[0].getMessage()
    assert caplog.records[2].getMessage() == "100 % plain"


def initialized(directory: str) -> list[str]:
    import deepspeed
    import torch

    import ds_silent

    logged: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    deepspeed.utils.logger.addHandler(handler)
    deepspeed.utils.logger.setLevel(logging.INFO)
    model = torch.nn.Linear(4, 4)
    alerts = [{"to": f"https://example.org/{SECRET}"}]
    block = {"output_dir": directory, "tensorboard": False, "alerts": alerts}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "silent_consistency": block,
    }
    engine, *_ = ds_silent.initialize(model=model, config=config)
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    observer.close()
    return logged


@pytest.mark.long
def test_deepspeeds_own_log(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    logged = "\n".join(run_distributed(initialized, 2, (str(tmp_path),))[0])
    assert "https://example.org/…" in logged  # it does log the block
    assert SECRET not in logged
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.glob("**/*") if path.is_file())
