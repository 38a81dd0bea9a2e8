"""Train a causal language model on a text file: as transformers' documentation describes ``run_clm.py``."""

import sys
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "The model checkpoint."})


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "The input training data file (a text file)."})
    block_size: int = field(default=16, metadata={"help": "Tokens of a row."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(args=sys.argv[1:])
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    raw = load_dataset("text", data_files={"train": data_args.train_file})

    with training_args.main_process_first(desc="dataset map tokenization"):
        tokenized = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])

    def group_texts(examples: dict) -> dict:
        joined = {key: list(chain(*examples[key])) for key in examples}
        length = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        cut = range(0, length, data_args.block_size)
        result = {key: [tokens[i : i + data_args.block_size] for i in cut] for key, tokens in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    with training_args.main_process_first(desc="grouping texts together"):
        grouped = tokenized.map(group_texts, batched=True)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=grouped["train"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_state()


if __name__ == "__main__":
    main()
