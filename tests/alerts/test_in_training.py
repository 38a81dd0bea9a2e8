"""Alerts of a real training: they arrive, a server that hangs delays no step, and no record holds the address."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import alerts as benchmark
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.config import ConfigError
from tests.alerts.servers import http_server
from tests.support.distributed import run_distributed

SECRET = "s3cr3t-T0k3n"


@pytest.mark.timeout(200)
@pytest.mark.long
def test_a_server_that_hangs_delays_no_step() -> None:
    found = benchmark.measure(rounds=1, steps=12, width=16)
    longest = {way: max(map(max, rounds)) for way, rounds in found["times"].items()}
    assert longest["hanging"] < 4.0  # one try takes 5 s, and there are three events and five tries
    assert max(found["ends"]["hanging"]) < 9.0  # 5 s for the last alerts
    assert max(found["delays"]) < 2.0
    assert len(found["delays"]) == 3
    assert found["secrets"] == 0


def same_rows(directory: str, address: str, taken: int) -> dict[str, Any]:
    """Two ranks with the same rows; rank 1 has another destination, and then rank 0 one that is not set."""
    torch.manual_seed(1)
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    said: list[str] = []
    logged: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    logging.getLogger("ds_silent").setLevel(logging.DEBUG)
    for number, to in enumerate(("env:NO_SUCH_VARIABLE", address)):
        alert = {"to": to if rank == 0 else f"https://example.org/{SECRET}"}
        block = {"output_dir": f"{directory}/{number}", "tensorboard": False, "alerts": [alert], "metrics_port": taken}
        try:
            with ds_silent.observe(model, optimizer, config=block) as observer:
                for step in range(4):
                    torch.manual_seed(step)
                    model(torch.randn(4, 8)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert observer is not None
        except ConfigError as error:
            said.append(str(error))
    return {"said": said, "logged": logged}


def test_ranks_with_the_same_rows_are_told(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with http_server() as server:
        taken = int(server.address.rpartition(":")[2])  # a port that is in use stops nothing
        found = run_distributed(same_rows, 2, (str(tmp_path), f"{server.address}/{SECRET}", taken))
        server.wait(1)
    for rank in (0, 1):
        [said] = found[rank]["said"]
        assert "alerts[0].to must name an environment variable that is set on the host of rank 0" in said
        assert SECRET not in said
    assert server.bodies[0]["kind"] == "duplicate-data"
    assert server.bodies[0]["run"] == str(tmp_path / "1")
    assert f"port {taken} cannot be listened on (Address already in use)" in "".join(found[0]["logged"])
    written = [path.read_bytes() for path in tmp_path.glob("**/*") if path.is_file()]
    assert len(written) > 2
    assert not any(SECRET.encode() in data for data in [*written, json.dumps(found).encode()])
