"""Rows from files, and their token ids and labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from finetune.data import Row, load_rows, parse_row
from finetune.encoding import IGNORED, collate, encode, hold_out, prompt_of
from finetune.settings import UserError

ROWS = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Name a colour.", "input": "", "output": "red"},
]
SUBSET = Path(__file__).resolve().parents[3] / "shared" / "data" / "alpaca_subset.json"


def tokenizer(bos: bool = False, pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte; a tokenizer whose tokens merge over the border would hide nothing that bytes show."""
    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>" if pad_is_eos else "<pad>"
    )


def rows(*texts: tuple[str, str, str]) -> list[Row]:
    return [Row(*text) for text in texts]


@pytest.mark.parametrize("name", ["list.json", "data.json", "rows.jsonl", "rows.parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "rows.parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "text": "unused"} for row in ROWS]), path)
    elif name == "rows.jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    else:
        path.write_text(json.dumps({"data": ROWS} if name == "data.json" else ROWS))
    assert load_rows(str(path)) == [Row("Add.", "1 2", "3"), Row("Name a colour.", "", "red")]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"instruction": "a", "output": "b"}, "no column 'input'"),
        ({"instruction": "a", "input": None, "output": "b"}, "text in column 'input', got nothing"),
        ({"instruction": "a", "input": "", "output": 7}, "text in column 'output', got int 7"),
        ({"instruction": " ", "input": "", "output": "b"}, "neither an instruction nor an input"),
        ("a line", "must be an object"),
    ],
)
def test_a_malformed_row_is_named_by_number_and_file(tmp_path: Path, bad: object, said: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*ROWS, bad]))
    with pytest.raises(UserError) as error:
        load_rows(str(path))
    assert f"row 2 (counted from 0) of {path}" in str(error.value)
    assert said in str(error.value)


def test_hostile_text_in_an_error_is_shortened_and_harmless() -> None:
    with pytest.raises(UserError) as error:
        parse_row({"instruction": "a", "input": ["\x1b[31m" * 500], "output": "b"}, 0, "x")
    assert "\x1b" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.json", '{"rows": []}', "must hold a list"),
        ("a.json", "[]", "holds no rows"),
        ("a.jsonl", '{"instruction": "a", "input": "", "output": "b"}\n{', "row 1 (counted from 0)"),
        ("a.parquet", "no parquet", "not a readable parquet"),
        ("a.csv", "a,b", "must be a file of kind"),
        ("a.json", None, "does not exist"),
    ],
)
def test_an_unusable_file_gets_one_sentence(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        load_rows(str(tmp_path / name))
    assert said in str(error.value)


def test_templates() -> None:
    with_input, without = rows(("Add {input}.", "{1}", "x"), ("Name.", "", "x"))
    assert "### Instruction:\nAdd {input}.\n\n### Input:\n{1}\n\n### Response:\n" in prompt_of(with_input, "alpaca")
    assert "### Input:" not in prompt_of(without, "alpaca")
    assert "### Instruction:\nName.\n\n### Input:\n\n\n### Response:\n" in prompt_of(without, "alpaca-with-input")


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_labels_are_the_response_and_nothing_else(bos: bool, eos: bool) -> None:
    made = tokenizer(bos=bos)
    row = Row("Say it.", "", "Yes!")
    example = encode([row], made, template="alpaca", max_length=1024, append_eos=eos).examples[0]
    batch = collate([example], pad_id=0)
    labelled = batch.labels[0][batch.labels[0] != IGNORED].tolist()
    expected = made("Yes!", add_special_tokens=False)["input_ids"] + ([2] if eos else [])
    assert labelled == expected
    assert made.decode(batch.input_ids[0][: example.prompt_length], skip_special_tokens=True) == prompt_of(
        row, "alpaca"
    )
    assert (batch.input_ids[0, 0] == 1) == bos


def test_padding_is_masked_by_position_where_pad_is_eos() -> None:
    made = tokenizer(pad_is_eos=True)
    found = encode(rows(("a", "", "b"), ("a", "", "bcdef")), made, template="alpaca", max_length=1024, append_eos=True)
    batch = collate(found.examples, made.pad_token_id)
    short, long = (len(example.ids) for example in found.examples)
    assert batch.attention_mask.sum(1).tolist() == [short, long]
    assert batch.labels[0, short - 1] == made.eos_token_id  # the real one is learnt
    assert (batch.labels[0, short:] == IGNORED).all()  # the padding is not
    assert batch.input_ids.dtype == batch.labels.dtype == batch.row_ids.dtype == torch.int64


def test_rows_without_a_label_are_dropped_and_the_others_keep_their_ids() -> None:
    texts = rows(("long " * 100, "", "cut away"), ("a", "", ""), ("a", "", "kept"))
    found = encode(texts, tokenizer(), template="alpaca", max_length=250, append_eos=True)
    assert (found.dropped, [example.row_id for example in found.examples]) == (2, [2])


def test_a_row_is_cut_at_the_maximum_length_and_keeps_a_label() -> None:
    prompt = len(prompt_of(Row("a", "", ""), "alpaca"))
    found = encode(rows(("a", "", "bcdef")), tokenizer(), template="alpaca", max_length=prompt + 1, append_eos=True)
    labels = collate(found.examples, 0).labels
    assert labels.shape == (1, prompt + 1)
    assert (labels != IGNORED).sum() == 1
    with pytest.raises(UserError, match="none of the 1 rows"):
        encode(rows(("a", "", "bcdef")), tokenizer(), template="alpaca", max_length=prompt, append_eos=True)


def test_held_out_rows_depend_on_the_seed_alone() -> None:
    found = encode(
        rows(*[("a", "", str(n)) for n in range(20)]), tokenizer(), template="alpaca", max_length=999, append_eos=True
    )
    training, evaluation = hold_out(found.examples, 5, seed=3)
    ids = [example.row_id for example in evaluation]
    assert ids == [example.row_id for example in hold_out(found.examples, 5, seed=3)[1]]
    assert ids != [example.row_id for example in hold_out(found.examples, 5, seed=4)[1]]
    assert sorted(ids + [example.row_id for example in training]) == list(range(20))
    with pytest.raises(UserError, match="below the 20 rows"):
        hold_out(found.examples, 20, seed=3)


@pytest.mark.skipif(not SUBSET.is_file(), reason="the shared Alpaca rows are not here")
def test_real_alpaca_rows_all_have_labels() -> None:
    found = encode(load_rows(str(SUBSET)), tokenizer(), template="alpaca-with-input", max_length=8192, append_eos=False)
    assert (len(found.examples), found.dropped) == (2400, 0)
