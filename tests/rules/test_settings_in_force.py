"""The settings that a training runs with, in run.json and on the report's page."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.framework import Setting
from ds_silent.rules.settings_in_force import settings_in_force
from ds_silent.runs.report.page import page_of
from ds_silent.runs.run import read_run
from tests.support import training
from tests.support.distributed import run_distributed
from tests.support.training import Case


@dataclass
class Stand:
    """What is asked of a framework."""

    module: nn.Module
    held: list[Any]
    micro_batches: int = 1
    given: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        named = list(self.module.named_parameters())
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]

    def optimizers(self) -> list[Any]:
        return self.held

    def schedulers(self) -> list[Any]:
        return self.given

    def settings(self) -> dict[str, Setting]:
        return {"gradient_clipping": Setting(1.0, "yours")}


def test_each_value_says_whose_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.GELU(approximate="tanh"), nn.Dropout(0.1))
    model.config = SimpleNamespace(_attn_implementation="sdpa")  # type: ignore[assignment]
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias, *model[1].parameters()], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-4, weight_decay=0.1)
    found = settings_in_force(Stand(model, [optimizer], micro_batches=4))  # type: ignore[arg-type]
    assert found["lr"] == (2e-4, "yours")
    assert found["betas"] == ([0.9, 0.999], "default")
    assert found["eps"] == (1e-8, "default")
    assert found["weight_decay of group 0"] == (0.1, "yours")
    assert found["weight_decay of group 1"] == (0.0, "yours")
    assert found["without weight decay"] == ("0.bias, 1.weight, 1.bias", "yours")
    assert found["optimizer"] == ("AdamW", "yours")
    assert found["optimizer's update"] == ("checked", "framework")
    assert found["gradient_clipping"] == (1.0, "yours")
    assert found["micro-batches of a step"] == (4, "yours")
    assert found["decoupled_weight_decay"] == (True, "framework"), "AdamW says so to Adam, and nobody to AdamW"
    assert found["model: approximate"] == ("tanh", "framework")
    assert found["model: eps"] == ("1e-05", "framework"), "of the norm"
    assert "model: p" not in found
    assert "micro-batches of a step" not in settings_in_force(Stand(model, [optimizer])), "nobody has said a number"  # type: ignore[arg-type]
    assert found["attention implementation"] == ("sdpa", "framework")
    assert found["precision of what the optimizer steps"] == ("float32", "framework")
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    own = settings_in_force(Stand(model, [optimizer, torch.optim.Rprop(model.parameters())]))  # type: ignore[arg-type]
    assert own["optimizer 0: lr"] == (2e-4, "framework"), "a schedule sets it"
    assert own["optimizer 1: optimizer's update"] == ("not checked", "framework")
    assert own["optimizer 1: etas"] == ([0.5, 1.2], "default")


@pytest.mark.parametrize(
    ("script", "product", "convolution"),
    [
        ("pass", ["highest", "default"], [True, "default"]),
        ("torch.set_float32_matmul_precision('high')", ["high", "yours"], [True, "default"]),
        ("torch.backends.cudnn.allow_tf32 = False", ["highest", "default"], [False, "yours"]),
        (
            "torch.backends.cuda.matmul.fp32_precision = 'tf32'; torch.backends.cudnn.conv.fp32_precision = 'ieee'",
            ["tf32", "yours"],
            ["ieee", "yours"],
        ),
    ],
)
@pytest.mark.long
def test_tf32_is_a_setting_by_either_name(script: str, product: list[Any], convolution: list[Any]) -> None:
    if "fp32_precision" in script and not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("this torch has the older names only")
    imports = "import json, torch; from ds_silent.rules.settings_in_force import _of_torch"
    code = f"{imports}; {script}; print(json.dumps(_of_torch()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = {"TF32: precision of fp32 matrix products": product, "TF32 in cuDNN": convolution}
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_what_schedules_write_and_what_json_cannot_is_not_listed_as_a_setting() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(10))
    groups = [{"params": one.parameters(), "lr": 0.1 / n} for n, one in enumerate(model, 1)]
    optimizer = torch.optim.SGD(groups, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["own"] = optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    found = settings_in_force(Stand(model, [optimizer], given=[scheduler]))  # type: ignore[arg-type]
    assert "initial_lr of group 0" not in found
    assert found["lr of group 7"] == (0.1 / 8, "framework")
    assert "lr of group 8" not in found
    assert found["lr of 2 more groups"] == ("not listed", "framework")
    assert "without weight decay" not in found, "nobody has any"
    assert found["own"] == ("SGD", "framework")
    assert found["schedule of the learning rate"] == ("ExponentialLR", "yours")
    plain = torch.optim.SGD(model.parameters(), lr=0.1)  # DeepSpeed's schedulers leave no initial_lr
    assert settings_in_force(Stand(model, [plain], given=[scheduler]))["lr"] == (0.1, "framework")  # type: ignore[arg-type]


class OwnDefaults(torch.optim.AdamW):
    """Pass on what it is given, with another default for one value and a value more."""

    def __init__(self, params: Any, lr: float = 0.05, own: int = 3, **given: Any):
        super().__init__(params, lr=lr, **given)
        for group in self.param_groups:
            group["own"] = own


def test_the_defaults_of_ancestors_are_those_of_what_is_passed_on() -> None:
    model = nn.Linear(2, 2)
    found = settings_in_force(Stand(model, [OwnDefaults(model.parameters(), weight_decay=0.3)]))  # type: ignore[arg-type]
    assert {name: found[name] for name in ("lr", "own", "betas", "weight_decay", "decoupled_weight_decay")} == {
        "lr": (0.05, "default"),  # its own, and not AdamW's
        "own": (3, "default"),
        "betas": ([0.9, 0.999], "default"),  # AdamW's
        "weight_decay": (0.3, "yours"),
        "decoupled_weight_decay": (True, "framework"),  # what AdamW says to Adam, to which it passes nothing on
    }
    assert settings_in_force(Stand(model, [OwnDefaults(model.parameters(), lr=1e-3)]))["lr"] == (1e-3, "yours")  # type: ignore[arg-type]


def test_a_tensor_is_read_on_the_host_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    optimizer.param_groups[0] |= {"momentum": torch.tensor(0.1, device="meta"), "dampening": torch.ones(2)}
    found = settings_in_force(Stand(model, [optimizer]))  # type: ignore[arg-type]
    assert {name: found[name] for name in ("lr", "momentum", "dampening")} == {
        "lr": (0.5, "yours"),
        "momentum": ("on the device", "yours"),
        "dampening": ("on the device", "yours"),
    }


def trainings(directory: Path) -> None:
    engine = training.build(Case(1, "bf16", clipping=0.5, accumulation=2), directory / "zero")
    training.one_step(engine, torch.Generator().manual_seed(dist.get_rank()))
    engine3 = training.build(Case(3, "bf16"), directory / "zero3")
    training.one_step(engine3, torch.Generator().manual_seed(dist.get_rank()))
    for one in (engine, engine3):
        observer = ds_silent.observer_of(one)
        assert observer is not None
        observer.close()
    model = DistributedDataParallel(nn.Linear(3, 3), gradient_as_bucket_view=True)
    config = {"output_dir": str(directory / "ddp"), "tensorboard": False}
    with ds_silent.observe(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config):
        pass


def test_they_are_in_the_records_and_on_the_page(tmp_path: Path) -> None:
    run_distributed(trainings, 2, (tmp_path,))
    zero, zero3, ddp = (
        json.loads((tmp_path / name / "run.json").read_text())["settings"] for name in ("zero", "zero3", "ddp")
    )
    assert zero3["precision of what the optimizer steps"] == {"value": "float32", "from": "framework"}
    assert zero["gradient_clipping"] == {"value": 0.5, "from": "yours"}
    assert zero["micro-batches of a step"] == {"value": 2, "from": "yours"}
    assert zero["zero_optimization.reduce_bucket_size"] == {"value": 500_000_000, "from": "default"}
    assert zero["precision of the trainable parameters"] == {"value": "bfloat16", "from": "framework"}
    assert zero["precision of what the optimizer steps"] == {"value": "float32", "from": "framework"}
    assert ddp["gradient_as_bucket_view"] == {"value": True, "from": "yours"}
    assert ddp["find_unused_parameters"] == {"value": False, "from": "default"}
    assert ddp["optimizer's update"] == {"value": "checked", "from": "framework"}
    facts = json.loads((tmp_path / "ddp" / "run.json").read_text())
    facts["settings"] |= {"<b>": {"value": "<script>", "from": "yours"}, "torn": 3}
    (tmp_path / "ddp" / "run.json").write_text(json.dumps(facts))
    page = page_of([read_run(tmp_path / "ddp")])
    assert "Settings in use" in page
    assert "gradient_as_bucket_view" in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page.partition("Settings in use")[2].partition("</section>")[0]
