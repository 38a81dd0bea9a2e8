"""Shared rooms name no framework; what DeepSpeed's users read is said with DeepSpeed's names, to the letter."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import ds_silent
from ds_silent.capture.local_settings import LocalSettings
from ds_silent.capture.settings_check import SettingsCheck
from ds_silent.config import ConfigError, DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.detectors.likely_causes import Symptoms, likely_causes
from ds_silent.exchange.observation import ASTRAY
from ds_silent.frameworks.deepspeed.state import WORDS
from ds_silent.maths.causes import Cause
from ds_silent.maths.rounding_bound import AggregateCheck
from ds_silent.measure.evidence import AppliedCheck, Evidence, OrderAgain, ReductionEvidence
from ds_silent.observing import start
from ds_silent.observing.lockstep import Lockstep
from ds_silent.records import Event
from ds_silent.text import TORCH, Words
from tests.support.made_observations import gathered_of
from tests.support.made_records import make

PACKAGE = Path(ds_silent.__file__).parent
SHARED = (
    *("detectors", "measure", "respond", "preflight", "maths", "capture", "exchange", "replicas", "distributed"),
    *("observing", "ordered", "kernels", "records.py", "patches"),
)
NAMES = re.compile(
    r"[Dd]eep[Ss]peed|ZeRO|zero_optimization|\bds_(id|shape|config)\b|\bengine\b|_batch_size_per_gpu|overlap_comm"
    r"|gradient_accumulation_steps|gradient_clipping|communication_data_type|[Mm]egatron|FSDP"
)


def told(seen: ReductionEvidence, words: Words) -> list[Event]:
    record = make(5, [2.0] * 4, [1.0] * 4, [0.1] * 4)
    return Judge(DetectorsConfig(), words=words).step(record, Evidence(reduction=seen))


def applied(factor: float, **more: Any) -> ReductionEvidence:
    check = AppliedCheck(4, 1.0, (factor,) * 4, 1e-6, 0.0, 1e-6, (), (), **more)
    return ReductionEvidence(applied=check, layers=("a",))


def test_a_wrong_reduction() -> None:
    seen = ReductionEvidence(check=AggregateCheck(1.0, 1.0, 1e-6), layers=("a",))
    assert told(seen, WORDS)[0].remedy == (
        "Look for a hook or other code of the script that changes gradients. Do not trust the weights of this run "
        "since then; go back to the last checkpoint before it. If that is not it, try another DeepSpeed version, "
        "overlap_comm false, or another communication_data_type."
    )
    assert told(seen, TORCH)[0].remedy == (
        "Look for a hook or other code of the script that changes gradients. Do not trust the weights of this run "
        "since then; go back to the last checkpoint before it. If that is not it, try another torch version."
    )


@pytest.mark.parametrize(("kind", "first"), [("unreduced", TORCH.not_reduced), ("leftover", TORCH.not_cleared)])
@pytest.mark.parametrize("named", [False, True])
def test_what_is_likely_comes_first(kind: Any, first: str, named: bool) -> None:
    another = () if named else (Cause(kind, (1,), factor=1.0, ranks=(0,)),)  # each layer has another rank's: nobody
    cause = Cause(kind, (0,), factor=1.0, ranks=(1,), elsewhere=another)
    seen = ReductionEvidence(check=AggregateCheck(1.0, 1.0, 1e-6), cause=cause, layers=("a", "b"))
    remedy = told(seen, TORCH)[0].remedy
    assert remedy.startswith(f"{first}. Do not trust")
    assert ("network of the rank named" in remedy) == named
    assert told(seen, WORDS)[0].remedy.startswith("Look for a hook or other code")


def test_another_multiple_is_applied() -> None:
    assert told(applied(4.0), WORDS)[0].remedy == (
        "Compare gradient_clipping, the loss scale and gradient_accumulation_steps with what the script itself does to "
        "gradients between backward and step; try another DeepSpeed version."
    )
    assert "DeepSpeed" not in told(applied(4.0), TORCH)[0].remedy


def test_a_step_is_unscaled_late() -> None:
    assert told(applied(0.5, rescaled=0.5), WORDS)[0].message == (
        "DeepSpeed unscaled this step with the next step's loss scale: 0.5 times the gradient was applied. (step 4)"
    )


def test_a_script_changes_gradients() -> None:
    (event,) = told(applied(2.0, changed=True, note=True), WORDS)
    assert "(step 4: 2 times the aggregated" in event.message
    assert event.remedy == (
        "Nothing to do if that is meant. What is written through tensor.data or safe_set_full_grad cannot be followed; "
        "in-place operations on parameter.grad can."
    )


def test_the_same_order_in_every_epoch() -> None:
    record = make(5, [2.0] * 4, [1.0] * 4, [0.1] * 4)
    again = Evidence(same_order=OrderAgain(again=True, log_odds=99.0, rows=64, shuffled=True))
    (event,) = Judge(DetectorsConfig(), words=WORDS).step(record, again)
    assert event.remedy == (
        "Call sampler.set_epoch(epoch) on every rank at the start of each epoch (engine.training_dataloader."
        "data_sampler of a loader that DeepSpeed has made), and do not seed the loader's generator anew."
    )
    (event,) = Judge(DetectorsConfig(), words=TORCH).step(record, again)
    assert "at the start of each epoch, and do not" in event.remedy


def test_ranks_take_other_numbers_of_rows() -> None:
    judge, event = Judge(DetectorsConfig(), words=WORDS), None
    for step in range(1, 5):
        events = judge.step(make(step, [2.0] * 4, [1.0] * 4, [0.1] * 4), Evidence(rows_taken=(4, 4, 8, 4)))
        event = next((one for one in events if one.kind == "batch-size-mismatch"), event)
    assert event is not None
    assert event.remedy.endswith("look at train_micro_batch_size_per_gpu and at the loader of the rank named.")


@pytest.mark.parametrize(("words", "setting"), [(WORDS, "gradient_accumulation_steps"), (TORCH, TORCH.accumulation)])
def test_the_likely_causes_of_another_number_of_micro_batches(words: Words, setting: str) -> None:
    counts = {"micro_batches": 4.0, "peers_micro_batches": 4.0}
    multiplied = likely_causes(Symptoms(loss=4.0, norm=4.0, **counts), words)[0]
    assert multiplied.text.endswith(f"the loss is not divided by {setting}, or divided twice by the others")
    counted = likely_causes(Symptoms(loss=1.0, norm=4.0, **counts), words)[0]
    assert counted.text == f"4 is about 4: the gradient is not divided by {setting}"
    counts["micro_batches"] = 2.0
    differs = {cause.name: cause for cause in likely_causes(Symptoms(loss=1.0, norm=1.5, **counts), words)}
    assert differs["accumulation-differs"].look_at == f"{setting} of this rank"


def test_a_step_is_left_out() -> None:
    gathered = gathered_of(7, 2, **{"status.failed": [0.0, ASTRAY]})
    for words, call in ((WORDS, "engine.step()"), (TORCH, "optimizer.step()")):
        _, event = Lockstep(1, words=words).read(gathered)
        assert event is not None
        assert event.remedy == f"Call {call} after every backward, on every rank."


def test_all_ranks_draw_alike() -> None:
    framework = SimpleNamespace(words=WORDS, module=nn.Linear(1, 1))
    check = SettingsCheck(LocalSettings(nn.Linear(1, 1), list), framework, guard=None)
    event = check.note(gathered_of(1, 2, **{"code.first_draws": [5.0, 5.0]}), 2)
    assert event is not None
    assert event.remedy.endswith("leave them alike where ranks must draw alike (layers that are skipped under ZeRO-3).")


@pytest.mark.parametrize(("model", "masks"), [(nn.Linear(1, 1), False), (nn.Sequential(nn.Dropout(0.1)), True)])
def test_masks_are_spoken_of_where_the_model_has_dropout(model: nn.Module, masks: bool) -> None:
    """MoCo draws the order in which it shuffles a batch."""
    check = SettingsCheck(LocalSettings(model, list), SimpleNamespace(words=TORCH, module=model), guard=None)
    event = check.note(gathered_of(1, 2, **{"code.first_draws": [5.0, 5.0]}), 2)
    assert event is not None
    assert ("masks" in event.message.split("rows")[0]) is masks


def test_there_is_nobody_to_agree_with() -> None:
    block = ds_silent.SilentConsistencyConfig()
    for words, training in ((WORDS, "engine"), (TORCH, "training")):
        with pytest.raises(ConfigError) as raised:
            start.agree_on_block(None, dict, words, block, None)
        assert str(raised.value) == f"silent_consistency cannot find the data-parallel group of this {training}"


def test_shared_rooms_name_no_framework() -> None:
    found = []
    files = [file for room in SHARED for file in sorted((PACKAGE / room).glob("**/*.py")) or [PACKAGE / room]]
    files = [file for file in files if file.name != "records_directory.py"]  # several engines have one each
    assert len(files) > 70
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        said = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        used = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        found += [f"{file.name}: {text}" for text in (*said, *used) if isinstance(text, str) and NAMES.search(text)]
    assert not found
