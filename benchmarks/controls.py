"""Healthy trainings of every unusual kind, through the observer as a user has it: none may raise a warning.

    python benchmarks/controls.py                        # all, 300 steps each: 15 minutes on one core
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ds_silent
from ds_silent.practice.language_model import LanguageModel, batch_of
from ds_silent.practice.model import IGNORED, VOCABULARY, PracticeModel, make_rows, warm_up
from ds_silent.practice.ranks import results_of
from ds_silent.sinks.jsonl import read_events, read_metrics

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the tests' trainings by the Trainer

RANKS, MICRO_BATCH, ROWS = 2, 8, 4096
RATE, SEED = 1e-3, 42
CONSOLE = Console(width=120)
Loss = Callable[[Any, Tensor, Tensor], Tensor]
"""Of the wrapped model, tokens and labels of a micro-batch."""


class Logits(PracticeModel):
    """Return the logits; the script makes the loss."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: Tensor = self.head(self.rescale(self.norm(hidden)))
        return logits


class LowRank(nn.Module):
    """A frozen linear layer, and beside it two small ones that are trained; the second begins with zeros."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.base(hidden) + 2.0 * self.up(self.down(hidden))
        return result


def low_rank(model: Any) -> None:
    model.requires_grad_(False)
    for attention in model.layers[::2]:
        attention.qkv = LowRank(attention.qkv)


# -- losses ------------------------------------------------------------------------------------------------------------


def given(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """The model's own."""
    loss: Tensor = model(tokens, labels)
    return loss


def _pairs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def summed(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_pairs(model(tokens), labels), ignore_index=IGNORED, reduction="sum")


def several(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    logits, targets = _pairs(model(tokens), labels)
    return 0.7 * F.cross_entropy(logits, targets, ignore_index=IGNORED) + 1e-3 * logits.logsumexp(1).square().mean()


def distilled(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """A teacher that the script has made of the student before it began."""
    teacher = vars(model).setdefault("_teacher", [copy.deepcopy(getattr(model, "module", model)).eval()])[0]
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
    gain = torch.randn(len(log))
    ratio = (log - log.detach() + 0.05 * torch.randn(len(log))).exp()
    policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
    return policy + 0.5 * (logits[kept, 0] - gain).square().mean() - 0.01 * entropy


def by_items(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Every label of the step counts alike, however many a rank has."""
    labels = labels.masked_fill(torch.rand(labels.shape) < 0.4 * dist.get_rank(), IGNORED)
    items = (labels[:, 1:] != IGNORED).sum()
    dist.all_reduce(items)
    return summed(model, tokens, labels) / items * RANKS


# -- optimizers and schedules ------------------------------------------------------------------------------------------


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(model: nn.Module) -> list[Any]:
    return [AdamW(_trained(model), lr=RATE, weight_decay=0.01)]


def two_optimizers(model: nn.Module) -> list[Any]:
    matrices = [parameter for parameter in _trained(model) if parameter.ndim > 1]
    rest = [parameter for parameter in _trained(model) if parameter.ndim == 1]
    return [SGD(matrices, lr=0.05, momentum=0.9, nesterov=True), AdamW(rest, lr=RATE)]


def rates_by_layer(model: nn.Module) -> list[Any]:
    groups = [{"params": [one], "lr": RATE * 0.9**n} for n, one in enumerate(reversed(_trained(model)))]
    return [AdamW(groups, weight_decay=0.01)]


def from_zero(optimizer: Any, steps: int) -> Any:
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, steps // 10, steps)


def restarts(optimizer: Any, steps: int) -> Any:
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, max(2, steps // 7), T_mult=2, eta_min=1e-5)


def one_cycle(optimizer: Any, steps: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=2 * RATE, total_steps=steps + 1)


def plateau(optimizer: Any, steps: int) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=3, factor=0.5)


# -- what scripts do between backward and step, and behind a step ------------------------------------------------------

Act = Callable[[Any, int, int], None]
"""Of the wrapped model, the step and the number of steps."""


def nothing(model: Any, step: int, steps: int) -> None: ...


def clip(model: Any, step: int, steps: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def unfreeze(model: Any, step: int, steps: int) -> None:
    """Two layers at first, a third after a third of the steps, and so on."""
    for number, layer in enumerate(model.module.layers):
        layer.requires_grad_(len(model.module.layers) - number <= 2 + 3 * step // steps)


def averaged(model: Any, step: int, steps: int) -> None:
    """A moving average, with which the script evaluates now and then."""
    weights = list(model.parameters())
    average = vars(model).setdefault("_average", [one.detach().clone() for one in weights])
    torch._foreach_lerp_(average, [one.detach() for one in weights], 0.01)
    if step % 25 == 0:
        trained = [one.detach().clone() for one in weights]
        with torch.no_grad():
            torch._foreach_copy_(weights, average)
            model.eval()
            rows = make_rows(8, seed=step)
            model.module(rows.tokens, rows.labels)
            model.train()
            torch._foreach_copy_(weights, trained)


def normalised(model: Any, step: int, steps: int) -> None:
    """Weights are bounded behind each step, on all ranks alike."""
    with torch.no_grad():
        for parameter in _trained(model):
            parameter.clamp_(-0.3, 0.3)


def written(model: Any, step: int, steps: int) -> None:
    """The same under DeepSpeed, by the call that it has for it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    for parameter in model.module.parameters():
        if parameter.requires_grad:
            whole = safe_get_full_fp32_param(parameter)
            safe_set_full_fp32_param(parameter, whole.clamp(-0.3, 0.3))


def language(**named: Any) -> LanguageModel:
    """A causal model of transformers; ``given`` makes its inputs of a batch."""
    model = LanguageModel()
    model.given = named.get("given")
    return model


def padding_free(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """All rows as one, without their padding: positions start again, and there is no mask."""
    kept, columns = batch["attention_mask"].bool(), torch.arange(batch["input_ids"].shape[1])
    labels = batch["labels"].masked_fill(columns == 0, IGNORED)
    positions = columns.expand_as(kept)
    return {"input_ids": batch["input_ids"][kept][None], "labels": labels[kept][None],
            "position_ids": positions[kept][None]}  # fmt: skip


class Bidirectional(nn.Module):
    """A BERT that is trained on the tokens that it does not see."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model: Any = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY + 3, **sizes))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        batch = batch_of(tokens, labels)
        hidden = (torch.rand(tokens.shape) < 0.3) & batch["attention_mask"].bool()
        hidden[:, 1] = True  # at least one
        shown = batch["input_ids"].masked_fill(hidden, VOCABULARY + 2)
        aims = batch["input_ids"].masked_fill(~hidden, IGNORED)
        loss: Tensor = self.model(input_ids=shown, labels=aims, attention_mask=batch["attention_mask"]).loss
        return loss


# -- the list ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """One healthy training; what is not said is a plain one of DistributedDataParallel."""

    loss: Loss = given
    model: Callable[[], nn.Module] = PracticeModel
    prepare: Callable[[Any], None] = lambda model: None
    optimizers: Callable[[nn.Module], list[Any]] = adamw
    schedule: Callable[[Any, int], Any] | None = None
    before: Act = nothing
    behind: Act = nothing
    accumulation: int = 1
    rows: int = ROWS
    wrapper: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False  # fp16 under autocast, with a GradScaler whose first steps overflow
    deepspeed: dict[str, Any] | None = None  # of its ds_config
    block: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] | None = None  # an HFCase of tests/integrations/hf_training.py


def _options(**options: Any) -> Callable[[Any], None]:
    return lambda model: model.loss_options.update(options)


def _frozen(model: Any) -> None:
    model.embedding.requires_grad_(False)
    model.layers[0].requires_grad_(False)


PROBED = {"probe": True}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}, "zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 300, "warmup_num_steps": 30}}
CONTROLS: dict[str, Control] = {
    "sum": Control(summed, Logits, optimizers=lambda model: [AdamW(_trained(model), lr=RATE)]),
    "weights-of-losses": Control(several, Logits, accumulation=2),
    "label-smoothing": Control(prepare=_options(label_smoothing=0.1)),
    "class-weights": Control(prepare=_options(weight=torch.linspace(0.5, 2.0, VOCABULARY))),
    "distillation": Control(distilled, Logits),
    "contrastive": Control(contrastive, Logits),
    "ppo": Control(ppo, Logits),
    "items-by-hand": Control(by_items, Logits),
    "items-of-trainer": Control(trainer={"accumulation": 2, "rows": 1600, "epochs": 10}),
    "short-last-window": Control(accumulation=4, rows=ROWS - 5 * RANKS * MICRO_BATCH),
    "short-last-window-of-trainer": Control(trainer={"accumulation": 4, "rows": 40 * 8 + 12, "epochs": 99}),
    "frozen": Control(prepare=_frozen),
    "staged": Control(before=unfreeze, wrapper={"find_unused_parameters": True}),
    "tied-in-deepspeed": Control(deepspeed={"zero_optimization": {"stage": 2}}),
    "lora": Control(prepare=low_rank),
    "several-optimizers": Control(optimizers=two_optimizers),
    "rates-by-layer": Control(optimizers=rates_by_layer, schedule=from_zero),
    "warm-up-from-0": Control(schedule=from_zero),
    "cosine-with-restarts": Control(schedule=restarts),
    "one-cycle": Control(schedule=one_cycle),
    "reduce-on-plateau": Control(schedule=plateau),
    "warm-up-of-deepspeed": Control(deepspeed={"zero_optimization": {"stage": 1}, "scheduler": COSINE}),
    "clipped-by-framework": Control(deepspeed={**BF16, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.1}),
    "clipped-by-hand": Control(before=clip),
    "bf16-stage-0": Control(deepspeed={**BF16, "zero_optimization": {"stage": 0}}, accumulation=2),
    "bf16-stage-3": Control(deepspeed={**BF16, "zero_optimization": {"stage": 3}}),
    "fp16-skips": Control(deepspeed=FP16),
    "fp16-skips-scaler": Control(scaled=True),
    "moving-average": Control(behind=averaged),
    "weights-changed": Control(behind=normalised),
    "weights-changed-in-deepspeed": Control(deepspeed={**BF16, "zero_optimization": {"stage": 1}}, behind=written),
    "causal": Control(model=language, block=PROBED),
    "bidirectional": Control(model=Bidirectional, block=PROBED),
    "padding-free": Control(model=partial(language, given=padding_free), block=PROBED),
}


# -- one training ------------------------------------------------------------------------------------------------------


def train(name: str, steps: int, folder: Path) -> None:
    """On each rank."""
    control = CONTROLS[name]
    if control.trainer is not None:
        from tests.integrations.hf_training import HFCase, train

        train(HFCase(steps=steps, **control.trainer), folder, observed=True)
        return
    torch.manual_seed(SEED)
    model = control.model()
    if isinstance(model, PracticeModel):
        model.load_state_dict(torch.load(folder.parent / "warm.pt"))
    control.prepare(model)
    torch.manual_seed(SEED + 1 + dist.get_rank())
    rows = make_rows(control.rows, seed=SEED)
    sampler: Any = DistributedSampler(TensorDataset(rows.tokens, rows.labels), RANKS, dist.get_rank(), seed=SEED)
    loader = DataLoader(sampler.dataset, MICRO_BATCH, sampler=sampler, drop_last=True)
    block = {"output_dir": str(folder / "silent"), "tensorboard": False, **control.block}
    loop = _by_torch if control.deepspeed is None else _by_deepspeed
    loop(control, model, loader, steps, block)


def _by_torch(control: Control, model: nn.Module, loader: Any, steps: int, block: dict[str, Any]) -> None:
    wrapped = DistributedDataParallel(model, **control.wrapper)
    optimizers = control.optimizers(model)
    schedulers = [] if control.schedule is None else [control.schedule(one, steps) for one in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=control.scaled)
    observer = ds_silent.attach(wrapped, block, optimizer=optimizers, loader=loader, accumulation=control.accumulation)
    assert observer is not None
    done = epoch = 0
    while done < steps:
        loader.sampler.set_epoch(epoch)
        epoch += 1
        for number, batch in enumerate(loader):
            begin = number // control.accumulation * control.accumulation
            window = min(control.accumulation, len(loader) - begin)
            last = number + 1 == begin + window
            control.before(wrapped, done, steps)
            with nullcontext() if last else wrapped.no_sync():
                with torch.autocast("cpu", torch.float16, enabled=control.scaled):
                    loss = control.loss(wrapped, *batch)
                scaler.scale(loss / window if window > 1 else loss).backward()
            if not last:
                continue
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for scheduler in schedulers:
                scheduler.step(*[_mean(loss)] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            for optimizer in optimizers:
                optimizer.zero_grad()
            control.behind(wrapped, done, steps)
            done += 1
            if done == steps:
                break
    observer.close()


def _mean(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / RANKS


def _by_deepspeed(control: Control, model: nn.Module, loader: Any, steps: int, block: dict[str, Any]) -> None:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch computes it on CPUs
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": control.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01, "torch_adam": True}},
        "silent_consistency": block,
        **(control.deepspeed or {}),
    }
    engine: Any = ds_silent.initialize(
        model=model, model_parameters=_trained(model), config=config, sampler=loader.sampler
    )[0]
    done = epoch = 0
    while done < steps:
        loader.sampler.set_epoch(epoch)
        epoch += 1
        for batch in loader:
            control.before(engine, done, steps)
            engine.backward(control.loss(engine, *batch))
            ends = engine.is_gradient_accumulation_boundary()
            engine.step()
            if ends:
                control.behind(engine, done, steps)
                done += 1
            if done == steps:
                break
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    observer.close()


# -- the table ---------------------------------------------------------------------------------------------------------


def main(
    steps: Annotated[int, typer.Option(help="optimizer steps of each training")] = 300,
    only: Annotated[list[str] | None, typer.Option(help="one training; may be given several times")] = None,
    keep: Annotated[Path | None, typer.Option(help="folder for the records; else they are thrown away")] = None,
) -> None:
    """Train each control and count its events; exit code 1 when there was a warning or an error."""
    unknown = set(only or ()) - set(CONTROLS)
    if unknown:
        raise typer.BadParameter(f"must be among {', '.join(CONTROLS)}; got {min(unknown)!r}", param_hint="--only")
    table = Table(title=f"Healthy trainings on {RANKS} ranks")
    for column in ("training", "steps", "seconds", "warnings and errors", "notes"):
        table.add_column(column, justify="left" if column == "training" else "right")
    total, taken = 0, 0
    with tempfile.TemporaryDirectory(prefix="ds_silent_controls_") as directory:
        folder = Path(directory) if keep is None else keep.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(SEED)
        model = PracticeModel()
        warm_up(model)
        torch.save(model.state_dict(), folder / "warm.pt")
        for name in [one for one in CONTROLS if only is None or one in only]:
            started = time.perf_counter()
            results_of(train, (name, steps, folder / name), RANKS, timeout=math.inf)
            silent = folder / name / "silent"
            records, path = read_metrics(silent / "metrics.jsonl"), silent / "events.jsonl"
            events = read_events(path) if path.exists() else []
            alarms = [event for event in events if event["severity"] in ("warning", "error")]
            seconds = time.perf_counter() - started
            CONSOLE.print(f"{name}: {len(records)} steps, {seconds:.0f} s, {len(alarms)} alarms")
            for event in events:
                said = f"  {event['severity']}, step {event['step']}, {event['kind']}: {event['message']}"
                CONSOLE.print(said if event in alarms else said[:110], markup=False)
            total, taken = total + len(alarms), taken + len(records)
            notes = len(events) - len(alarms)
            table.add_row(name, str(len(records)), f"{seconds:.0f}", str(len(alarms)), str(notes))
    CONSOLE.print(table)
    CONSOLE.print(f"{total} false alarms in {taken:,} steps")
    raise SystemExit(1 if total else 0)


if __name__ == "__main__":
    typer.run(main)
