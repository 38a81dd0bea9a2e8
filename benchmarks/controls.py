"""Healthy trainings of every unusual kind, through the observer as a user has it: none may raise a warning.

    python benchmarks/controls.py                        # all, 300 steps each: 8 minutes of CPU
    python benchmarks/controls.py --only ppo --only lora --steps 50

Two gloo ranks on the CPU, everything on that judges. The practice model, warmed up once; each rank's rows by a sharded
sampler, drawn anew in each epoch of 256 steps. A warning or an error is a false alarm and printed; notes are counted.
"""

from __future__ import annotations

import copy
import math
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

import ds_silent
from ds_silent.practice.model import IGNORED, VOCABULARY, WIDTH, LanguageModel, PracticeModel, make_rows, warm_up
from ds_silent.practice.ranks import results_of
from ds_silent.sinks.jsonl import read_events, read_metrics

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.integrations import hf_training

RANKS, MICRO_BATCH, ROWS, RATE, SEED = 2, 8, 4096, 1e-3, 42


class Logits(PracticeModel):
    """Return the logits; the script makes the loss."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: Tensor = self.head(self.rescale(self.norm(hidden)))
        return logits


def low_rank(model: Any) -> None:
    """Freeze the model, and train small layers beside its linear ones; the second of each begins with zeros."""
    model.requires_grad_(False)
    for attention in model.layers[::2]:
        attention.qkv.down, attention.qkv.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 3 * WIDTH, bias=False)
        nn.init.zeros_(attention.qkv.up.weight)
        attention.qkv.register_forward_hook(lambda one, given, made: made + 2.0 * one.up(one.down(given[0])))


def _pairs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def crossed(model: Any, tokens: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(*_pairs(model(tokens), labels), ignore_index=IGNORED, **options)


def several(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    logits, targets = _pairs(model(tokens), labels)
    return 0.7 * F.cross_entropy(logits, targets, ignore_index=IGNORED) + 1e-3 * logits.logsumexp(1).square().mean()


def distilled(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """The teacher is what the student was before it began."""
    teacher = vars(model).setdefault("_teacher", [copy.deepcopy(model.module).eval()])[0]
    logits, targets = _pairs(model(tokens), labels)
    with torch.no_grad():
        aims = (teacher(tokens)[:, :-1].flatten(0, 1) / 2.0).softmax(1)
    soft = F.kl_div((logits / 2.0).log_softmax(1), aims, reduction="batchmean")
    return 0.5 * F.cross_entropy(logits, targets, ignore_index=IGNORED) + 0.5 * 4.0 * soft


def contrastive(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Two draws of dropout of each row are alike, and no two rows."""
    one, other = F.normalize(model(torch.cat([tokens, tokens])).mean(1), dim=1).chunk(2)
    similar, own = one @ other.t() / 0.1, torch.arange(len(tokens))
    return (F.cross_entropy(similar, own) + F.cross_entropy(similar.t(), own)) / 2


def ppo(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    logits, targets = _pairs(model(tokens), labels)
    kept = targets != IGNORED
    log = logits.log_softmax(1)[kept].gather(1, targets[kept, None])[:, 0]
    gain, ratio = torch.randn(len(log)), (log - log.detach() + 0.05 * torch.randn(len(log))).exp()
    policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
    return policy + 0.5 * (logits[kept, 0] - gain).square().mean() - 0.01 * entropy


def by_items(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Every label of the step counts alike, and rank 1 has fewer."""
    labels = labels.masked_fill(torch.rand(labels.shape) < 0.4 * dist.get_rank(), IGNORED)
    dist.all_reduce(items := (labels[:, 1:] != IGNORED).sum())
    return crossed(model, tokens, labels, reduction="sum") / items * RANKS


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def unfreeze(model: Any, step: int, steps: int) -> None:
    """The last two layers at first, one more behind a third of the steps, and so on."""
    for number, layer in enumerate(model.module.layers):
        layer.requires_grad_(len(model.module.layers) - number <= 2 + 3 * step // steps)


@torch.no_grad()
def averaged(model: Any, step: int, steps: int) -> None:
    """A moving average, with which the script evaluates now and then."""
    weights = list(model.parameters())
    average = vars(model).setdefault("_average", [one.clone() for one in weights])
    torch._foreach_lerp_(average, weights, 0.01)
    if step % 25 == 0:
        trained, rows = [one.clone() for one in weights], make_rows(8, seed=step)
        torch._foreach_copy_(weights, average)
        model.eval().module(rows.tokens, rows.labels)
        torch._foreach_copy_(weights, trained)
        model.train()


def bounded_masters(model: Any, step: int, steps: int) -> None:
    """DeepSpeed's call writes the masters, and leaves the weights as they are until the next update."""
    for parameter in _trained(model.module):
        whole = safe_get_full_fp32_param(parameter).clamp(-0.3, 0.3)
        safe_set_full_fp32_param(parameter, whole)
        parameter.data.copy_(whole)


def language(given: Any = None, made: Callable[[], Any] | None = None) -> LanguageModel:
    """A causal model, or another one; ``given`` makes its inputs of a padded batch."""
    model = LanguageModel()
    model.given, model.model = given, model.model if made is None else made()
    return model


def padding_free(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """All rows as one, without their padding: positions start again, and there is no mask."""
    kept, columns = batch["attention_mask"].bool(), torch.arange(batch["input_ids"].shape[1])
    rows = batch["input_ids"], batch["labels"].masked_fill(columns == 0, IGNORED), columns.expand_as(kept)
    return dict(zip(("input_ids", "labels", "position_ids"), (one[kept][None] for one in rows), strict=True))


def masked(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Three tokens of ten are hidden, and these are the labels."""
    hidden = (torch.rand(batch["labels"].shape) < 0.3) & batch["attention_mask"].bool()
    hidden[:, 1] = True
    shown, aims = batch["input_ids"].masked_fill(hidden, VOCABULARY), batch["input_ids"].masked_fill(~hidden, IGNORED)
    return {**batch, "input_ids": shown, "labels": aims}


@dataclass(frozen=True)
class Control:
    """One healthy training; what is not said is a plain one of DistributedDataParallel."""

    loss: Callable[[Any, Tensor, Tensor], Tensor] = lambda model, tokens, labels: model(tokens, labels)
    model: Callable[[], nn.Module] = PracticeModel
    prepare: Callable[[Any], Any] = lambda model: None
    optimizers: Callable[[nn.Module], list[Any]] = lambda model: [AdamW(_trained(model), lr=RATE, weight_decay=0.01)]
    schedule: Callable[[Any, int], Any] | None = None  # of an optimizer and the number of steps
    clips: float = math.inf  # by hand
    behind: Callable[[Any, int, int], Any] = lambda model, step, steps: None  # after a step, of the wrapped model
    accumulation: int = 1
    rows: int = ROWS
    unused: bool = False  # parameters, which the wrapper looks for
    scaled: bool = False  # fp16 under autocast, with a GradScaler whose first steps overflow
    deepspeed: dict[str, Any] | None = None  # of its ds_config
    probe: bool = False
    trainer: dict[str, Any] | None = None  # an HFCase of tests/integrations/hf_training.py


def _zero(stage: int, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    low = {"enabled": True, **({"initial_scale_power": 24, "hysteresis": 1} if dtype == "fp16" else {})}
    return {"zero_optimization": {"stage": stage}, **({} if dtype == "fp32" else {dtype: low}), **more}


BERT: Any = BertConfig(vocab_size=VOCABULARY + 2, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4)
FROM_ZERO = Control(schedule=lambda one, steps: get_linear_schedule_with_warmup(one, steps // 10, steps))
CLASSES = torch.linspace(0.5, 2.0, VOCABULARY)  # weights
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 300, "warmup_num_steps": 30}}
CONTROLS: dict[str, Control] = {
    "sum": Control(partial(crossed, reduction="sum"), Logits),
    "weights-of-losses": Control(several, Logits, accumulation=2),
    "label-smoothing": Control(prepare=lambda model: model.loss_options.update(label_smoothing=0.1)),
    "class-weights": Control(prepare=lambda model: model.loss_options.update(weight=CLASSES)),
    "distillation": Control(distilled, Logits),
    "contrastive": Control(contrastive, Logits),
    "ppo": Control(ppo, Logits),
    "items-by-hand": Control(by_items, Logits),
    "items-of-trainer": Control(trainer={"accumulation": 2, "rows": 1600, "epochs": 99}),
    "short-last-window": Control(accumulation=4, rows=ROWS - 5 * RANKS * MICRO_BATCH),
    "short-last-window-of-trainer": Control(trainer={"accumulation": 4, "rows": 332, "epochs": 99}),
    "frozen": Control(prepare=lambda model: model.layers[:2].requires_grad_(False)),
    "staged": Control(behind=unfreeze, unused=True),
    "tied-in-deepspeed": Control(deepspeed=_zero(2)),
    "lora": Control(prepare=low_rank),
    "several-optimizers": Control(
        optimizers=lambda model: [
            SGD(model.layers.parameters(), lr=0.05, momentum=0.9, nesterov=True),
            AdamW([*model.embedding.parameters(), *model.position.parameters(), *model.norm.parameters()], lr=RATE),
        ]
    ),
    "rates-by-layer": replace(
        FROM_ZERO,
        optimizers=lambda model: [
            AdamW([{"params": [one], "lr": RATE * 0.9**n} for n, one in enumerate(_trained(model))])
        ],
    ),
    "warm-up-from-0": FROM_ZERO,
    "cosine-with-restarts": Control(
        schedule=lambda one, steps: lr_scheduler.CosineAnnealingWarmRestarts(one, max(2, steps // 7), 2, 1e-5)
    ),
    "one-cycle": Control(schedule=lambda one, steps: lr_scheduler.OneCycleLR(one, 2 * RATE, total_steps=steps + 1)),
    "reduce-on-plateau": Control(schedule=lambda one, steps: lr_scheduler.ReduceLROnPlateau(one, patience=3)),
    "warm-up-of-deepspeed": Control(deepspeed=_zero(1, scheduler=COSINE)),
    "clipped-by-framework": Control(deepspeed=_zero(2, "bf16", gradient_clipping=0.1)),
    "clipped-by-hand": Control(clips=0.1),
    "bf16-stage-0": Control(deepspeed=_zero(0, "bf16"), accumulation=2),
    "fp16-skips": Control(deepspeed=_zero(1, "fp16")),
    "fp16-skips-scaler": Control(scaled=True),
    "moving-average": Control(behind=averaged),
    "weights-changed": Control(behind=lambda model, *_: [one.data.clamp_(-0.3, 0.3) for one in model.parameters()]),
    "weights-changed-in-deepspeed": Control(deepspeed=_zero(1, "bf16"), behind=bounded_masters),
    "causal": Control(model=language, probe=True),
    "bidirectional": Control(model=partial(language, masked, lambda: BertForMaskedLM(BERT)), probe=True),
    "padding-free": Control(model=partial(language, padding_free), probe=True),
}


def train(name: str, steps: int, folder: Path) -> float:
    """Train on each rank, and return the seconds of CPU that it took."""
    if (control := CONTROLS[name]).trainer is not None:
        hf_training.train(hf_training.HFCase(steps=steps, **control.trainer), folder, observed=True)
        return time.process_time()
    torch.manual_seed(SEED)
    model = control.model()
    if isinstance(model, PracticeModel):
        model.load_state_dict(torch.load(folder.parent / "warm.pt"))
    control.prepare(model)
    torch.manual_seed(SEED + 1 + dist.get_rank())
    rows = make_rows(control.rows, seed=SEED)
    sampler: Any = DistributedSampler(TensorDataset(rows.tokens, rows.labels), RANKS, dist.get_rank(), seed=SEED)
    loader = DataLoader(sampler.dataset, MICRO_BATCH, sampler=sampler, drop_last=True)
    block = {"output_dir": str(folder / "silent"), "tensorboard": False, "probe": control.probe}
    make = _of_torch if control.deepspeed is None else _of_deepspeed  # micro_batch tells whether a step has ended
    wrapped, observer, micro_batch = make(control, model, loader, steps, block)
    done = epoch = 0
    while done < steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for number, batch in enumerate(loader):
            if done < steps and micro_batch(number, batch):
                control.behind(wrapped, done, steps)
                done += 1
    observer.close()
    return time.process_time()


def _of_torch(control: Control, model: nn.Module, loader: Any, steps: int, block: dict[str, Any]) -> Any:
    wrapped = DistributedDataParallel(model, find_unused_parameters=control.unused)
    optimizers = control.optimizers(model)
    schedulers = [] if control.schedule is None else [control.schedule(one, steps) for one in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=control.scaled)
    observer = ds_silent.attach(wrapped, block, optimizer=optimizers, loader=loader, accumulation=control.accumulation)

    def micro_batch(number: int, batch: list[Tensor]) -> bool:
        place = number % control.accumulation
        window = min(control.accumulation, len(loader) - number + place)
        with nullcontext() if place + 1 == window else wrapped.no_sync():
            with torch.autocast("cpu", torch.float16, enabled=control.scaled):
                loss = control.loss(wrapped, *batch)
            scaler.scale(loss / window if window > 1 else loss).backward()
        if place + 1 < window:
            return False
        if control.clips < math.inf:
            nn.utils.clip_grad_norm_(wrapped.parameters(), control.clips)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        dist.all_reduce(total := loss.detach().clone())
        for scheduler in schedulers:
            scheduler.step(*[float(total)] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        return True

    return wrapped, observer, micro_batch


def _of_deepspeed(control: Control, model: nn.Module, loader: Any, steps: int, block: dict[str, Any]) -> Any:
    get_accelerator().is_fp16_supported = lambda: True  # torch computes it on CPUs
    config = {"train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_accumulation_steps": control.accumulation}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01, "torch_adam": True}}}
    given = {"sampler": loader.sampler, "config": {**config, "silent_consistency": block, **(control.deepspeed or {})}}
    engine: Any = ds_silent.initialize(model=model, model_parameters=_trained(model), **given)[0]

    def micro_batch(number: int, batch: list[Tensor]) -> bool:
        engine.backward(control.loss(engine, *batch))
        engine.step()
        return bool(engine.micro_steps % control.accumulation == 0)

    return engine, ds_silent.observer_of(engine), micro_batch


def main(
    steps: Annotated[int, typer.Option(help="optimizer steps of each training")] = 300,
    only: Annotated[list[str] | None, typer.Option(help="one training; may be given several times")] = None,
) -> None:
    """Train each control and count its events; exit code 1 when there was a warning or an error."""
    if unknown := set(only or ()) - set(CONTROLS):
        raise typer.BadParameter(f"must be among {', '.join(CONTROLS)}; got {min(unknown)!r}", param_hint="--only")
    total = 0
    with tempfile.TemporaryDirectory(prefix="ds_silent_controls_") as directory:
        torch.manual_seed(SEED)
        warm_up(model := PracticeModel())
        torch.save(model.state_dict(), f"{directory}/warm.pt")
        print(f"{'training':30}{'steps':>7}{'CPU seconds':>13}{'warnings, errors':>18}{'notes':>7}")
        for name in only or CONTROLS:
            folder = Path(directory, name)
            seconds = sum(results_of(train, (name, steps, folder), RANKS, timeout=math.inf))
            path, records = folder / "silent" / "events.jsonl", read_metrics(folder / "silent" / "metrics.jsonl")
            events = read_events(path) if path.exists() else []
            alarms = sum(event["severity"] != "info" for event in events)
            print(f"{name:30}{len(records):7}{seconds:13.0f}{alarms:18}{len(events) - alarms:7}", flush=True)
            for event in events:
                print(f"    {event['severity']}, step {event['step']}, {event['kind']}: {event['message']}")
            total += alarms
    print(f"{total} false alarms of healthy trainings on {RANKS} ranks")
    raise SystemExit(1 if total else 0)


if __name__ == "__main__":
    typer.run(main)
