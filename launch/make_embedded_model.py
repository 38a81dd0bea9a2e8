"""Makes the embedded default model, an openPangu-shaped Llama of about 2 M parameters, its tokenizer and its rows.

    python launch/make_embedded_model.py --output launch/finetune/embedded    # a few minutes on one CPU core
    python launch/make_embedded_model.py --rows launch/finetune/embedded      # the fine-tune's rows only, in a second
    python launch/make_embedded_model.py --check launch/finetune/embedded     # what a healthy run looks like with it

The model is warmed up on the embedded instruction set, made with another seed than the fine-tune's rows, and stopped
early: random weights would show a loss dispersion far too small and gradients far too parallel, and a converged
model would have nothing left to learn. One thread and fixed seeds make it the same bits again on the same kind of CPU
with the same version of torch.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from finetune.data import EMBEDDED_ROWS, Row, load_rows
from finetune.encoding import Example, collate, encode, prompt_of
from finetune.models import LoadedModel, ModelError, load, save
from finetune.settings import Template
from instructions import generate
from instructions.tasks import Draw
from instructions.vocabulary import COMMON

VOCABULARY = 4096
MAX_LENGTH = 384  # tokens of one row; the longest of the instruction set fit
# openPangu's scheme: pad 0, bos 1, eos [unused10]; [unused9] opens and [unused10] closes a turn of a chat.
SPECIAL = ("<pad>", "<s>", "</s>", *(f"[unused{i}]" for i in range(13)))
PAD, BOS, EOS = "<pad>", "<s>", "[unused10]"
WARM_UP_SEED = 1  # the fine-tune's rows are of seed 0
ROWS = 16384
COPIES = ROWS // 5
TEMPLATE: Template = "alpaca-with-input"


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE over all kinds of task: every text can be encoded, nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [prompt_of(row, TEMPLATE) + row.output for row in instruction_rows(ROWS, WARM_UP_SEED)]
    frequent = [f"{word} {word}" for word in COMMON] * 20
    tokenizer.train_from_iterator(texts + frequent, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, model_max_length=2048
    )


def build_model() -> LlamaForCausalLM:
    """openPangu-Embedded-1B made small: bias on q, k, v and o, two query heads per key/value head, tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=40,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        attention_bias=True,
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        use_cache=False,
    )
    if hasattr(config, "rope_parameters"):  # transformers 5
        config.rope_parameters = {"rope_type": "default", "rope_theta": 4e6}
    else:
        config.rope_theta = 4e6
    return LlamaForCausalLM(config)


def make_portable(directory: Path) -> None:
    """Writes what transformers 4 reads, too: it has no ``TokenizersBackend`` and looks for ``rope_theta``."""
    for name, entry in {
        "tokenizer_config": ("tokenizer_class", "PreTrainedTokenizerFast"),
        "config": ("rope_theta", 4e6),
    }.items():
        path = directory / f"{name}.json"
        content = json.loads(path.read_text())
        content[entry[0]] = entry[1]
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (directory / "model.safetensors").chmod(0o644)


def instruction_rows(count: int, seed: int) -> list[Row]:
    return [Row(row["instruction"], row["input"], row["output"]) for row in generate(count, seed)]


def write_rows(directory: Path) -> Path:
    """Writes the fine-tune's 4,096 rows into ``directory``: one JSON object per line, the same bytes every time."""
    path = directory / EMBEDDED_ROWS.name
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in generate())
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    return path


def copying_rows(count: int, seed: int) -> list[Row]:
    """Rows that repeat frequent words: the instruction set never uses them, and other data is full of them."""
    draw = Draw(seed)
    texts = [" ".join(draw.pick(COMMON) for _ in range(draw.between(4, 40))) for _ in range(count)]
    return [Row("Repeat the words.", text, text) for text in texts]


def encode_rows(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> list[Example]:
    return encode(rows, tokenizer, template=TEMPLATE, max_length=MAX_LENGTH, append_eos=True).examples


def batches(examples: list[Example], size: int, seed: int, pad: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless shuffled batches: int64 ``input_ids``, ``attention_mask`` and ``labels``, (size, longest)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(examples), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            batch = collate([examples[i] for i in order[start : start + size]], pad_id=pad)
            yield {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}


def warm_up(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int, *, peak: float = 3e-3
) -> None:
    """Trains on the responses with AdamW, 20 steps of warm-up and a cosine down to a tenth of the rate."""
    rows = instruction_rows(ROWS, WARM_UP_SEED) + copying_rows(COPIES, WARM_UP_SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    stream = batches(encode_rows(tokenizer, rows), 16, seed, tokenizer.pad_token_id)
    for step in range(steps):
        rate = min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = peak * rate
        loss = model(**next(stream)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)


def dispersion(
    model: torch.nn.Module, examples: list[Example], pad: int, *, ranks: int, steps: int = 12, batch: int = 4
) -> dict[str, float]:
    """Loss, loss std, gradient-norm CV and mean pairwise cosine of simulated ranks: means over steps, no updates."""
    stream = batches(examples, batch, 7, pad)
    found: dict[str, list[float]] = {"loss": [], "loss std": [], "norm CV": [], "mean cosine": []}
    for _ in range(steps):
        losses, gradients = [], []
        for _ in range(ranks):
            model.zero_grad()
            loss = model(**next(stream)).loss
            loss.backward()
            losses.append(loss.item())
            gradients.append(torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None]))
        norms = [gradient.norm().item() for gradient in gradients]
        unit_sum = torch.stack([gradient / gradient.norm() for gradient in gradients]).sum(0)
        found["loss"].append(statistics.mean(losses))
        found["loss std"].append(statistics.pstdev(losses))
        found["norm CV"].append(statistics.pstdev(norms) / statistics.mean(norms))
        found["mean cosine"].append(((unit_sum @ unit_sum).item() - ranks) / (ranks * (ranks - 1)))
    return {name: statistics.mean(values) for name, values in found.items()}


def check(source: Path, ranks: int) -> None:
    """Prints the dispersion of the model in ``source`` beside that of random weights, on the fine-tune's rows."""
    loaded = load(str(source), dtype=torch.float32)
    tokenizer = loaded.tokenizer
    examples = encode_rows(tokenizer, load_rows("embedded"))
    torch.manual_seed(0)
    for name, model in {"random": build_model(), "warm": loaded.model}.items():
        figures = dispersion(model, examples, tokenizer.pad_token_id, ranks=ranks)
        print(f"{name:8s}" + "".join(f"  {key} {value:.3f}" for key, value in figures.items()), flush=True)


def main(
    output: Annotated[Path | None, typer.Option(help="Directory to write the model to; it is replaced.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of warm-up.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the rows.")] = 0,
    check_model: Annotated[Path | None, typer.Option("--check", help="Model whose dispersion to print.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Directory to write the fine-tune's rows to, and no model.")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Simulated ranks of --check.")] = 8,
) -> None:
    """Makes the embedded model and rows (--output), only the rows (--rows), or prints a dispersion (--check)."""
    if output is None and check_model is None and rows is None:
        raise typer.BadParameter("give --output DIRECTORY to make a model, or --check DIRECTORY to look at one")
    if rows is not None:
        print(write_rows(rows))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if output is not None:
        tokenizer = train_tokenizer()
        torch.manual_seed(seed)
        model = build_model()
        print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
        warm_up(model, tokenizer, steps, seed)
        model.to(torch.bfloat16)
        save(LoadedModel(model, tokenizer, str(output), "embedded"), model, output, None)
        make_portable(output)
        write_rows(output)
        size = sum(path.stat().st_size for path in output.iterdir())
        print(f"{size / 2**20:.1f} MB in {output}")
    if check_model is not None:
        check(check_model, ranks)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ModelError as error:
        raise SystemExit(f"error: {error}") from None
