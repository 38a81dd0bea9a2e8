"""The released bugs that released_bugs.py trains: which release is wrong, which is right, and what tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bug:
    """One row. A release is what is laid over this environment; an empty one is this environment itself.

    ``told`` is the kind of the event that tells it at its first wrong step; None: nothing does, for this ``reason``.
    ``beside`` is the kind of the event that tells another bug of this list, which both releases have. ``parts`` is the
    link of the chain at which the wrong release's training parts from the right one's, at its first wrong step by the
    number, or at ``parts_at``.
    """

    name: str
    source: str  # where it was published
    case: str
    wrong: tuple[str, ...]
    right: tuple[str, ...] | None  # None: in no release yet
    told: str | None = None
    reason: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    beside: str = ""
    parts: str = ""
    parts_at: int | None = None


COSINE = {"total_num_steps": 20, "warmup_num_steps": 3, "warmup_type": "linear", "cos_min_ratio": 0.1}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}
DEEPSPEED = (
    Bug(
        "WarmupLR gives every group the first group's rate",
        "DeepSpeed pull 8171",
        "schedule",
        ("deepspeed==0.19.3",),
        (),
        "update-mismatch",
        given={
            "kind": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_type": "linear"},
            "promised": "linear",
        },
        parts="rates",
    ),
    Bug(
        "WarmupCosineLR leaves the second group at its full rate in the first step",
        "DeepSpeed pull 7969",
        "schedule",
        ("deepspeed==0.18.9",),
        (),
        "update-mismatch",
        given={"kind": "WarmupCosineLR", "params": COSINE, "promised": "cosine"},
        parts="rates",
    ),
    Bug(
        "ZeRO-2 with an offloaded optimizer drops all micro-batches but the first and the last",
        "DeepSpeed pulls 7967 and 7981",
        "accumulated",
        ("deepspeed==0.18.3",),
        (),
        "aggregation-error",
        given={"config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
        parts="reduced",
    ),
    Bug(
        "scale_wrt_gas=False divides all the same",
        "DeepSpeed pull 7724",
        "accumulated",
        ("deepspeed==0.18.3",),
        (),
        "objective-mismatch",
        given={"config": {"zero_optimization": {"stage": 1}}, "scaled": True},
        parts="local",
    ),
    Bug(
        "bf16 with fp32 accumulation adds the last micro-batch behind the reduction",
        "DeepSpeed pull 7985",
        "accumulated",
        ("deepspeed==0.18.9",),
        (),
        "aggregation-error",
        given={"config": BF16, "accumulation": 2, "rate": 1.0, "rounds": 0.05},
        parts="reduced",
    ),
)


def hub(transformers: str, tokenizers: str, hub: str, accelerate: str, *more: str) -> tuple[str, ...]:
    """A transformers release, with the releases of its time that it asks for."""
    old = (f"tokenizers=={tokenizers}", f"huggingface_hub=={hub}", f"accelerate=={accelerate}", "datasets==3.6.0")
    return (*more, f"transformers=={transformers}", *old)


V4_45 = hub("4.45.2", "0.20.3", "0.26.5", "1.0.1")
V4_46 = hub("4.46.1", "0.20.3", "0.26.5", "1.0.1")
V4_47 = hub("4.47.1", "0.21.0", "0.27.1", "1.2.1")
V4_57 = hub("4.57.1", "0.22.1", "0.36.0", "1.10.1")
TRAINER = (
    Bug(
        "the Trainer takes the mean of the micro-batches' means",
        "transformers issue 34242",
        "tokens",
        V4_45,
        (),
        None,
        "that release promises no mean over tokens; how the labels' weights differ is in the records",
        parts="local",
    ),
    Bug(
        "the Trainer counts tokens per rank, and averages over ranks",
        "transformers pull 34373",
        "tokens",
        V4_46,
        (),
        None,
        "by that release's setting each rank counts its own items; how their weights differ is in the records",
        parts="local",
    ),
    Bug(
        "GPT-2's loss is not divided by the accumulation",
        "transformers pull 34511",
        "tokens",
        V4_46,
        (),
        "objective-mismatch",
        given={"family": "GPT2"},
        parts="local",
    ),
    Bug(
        "a smoothed loss is not divided by the accumulation",
        "transformers issue 46731",
        "tokens",
        V4_57,
        (),
        "objective-mismatch",
        given={"label_smoothing_factor": 0.1},
        parts="loss",
    ),
    Bug(
        "num_items_in_batch counts each row's first label, which nothing predicts",
        "transformers pull 46204",
        "tokens",
        V4_57,
        (),
        None,
        "it is a note, because nobody but transformers can do anything about it",
        given={"first": True},
        parts="local",
    ),
    Bug(
        "the Trainer takes BERT's mean for a sum that it has divided",
        "in transformers 5.23.0 itself",
        "masked_words",
        (),
        None,
        "objective-mismatch",
    ),
    Bug(
        "interleave_datasets forgets which rank's rows a data set holds",
        "datasets issue 7868",
        "interleaved",
        ("datasets==3.6.0",),
        (),
        "duplicate-data",
        parts="rows",
    ),
    Bug(
        "the routers' auxiliary loss counts once per micro-batch and rank",
        "in transformers 5.23.0 itself",
        "routers",
        (),
        None,
        None,
        "an auxiliary loss beside the labels' is named, and its weight is not judged",
    ),
    Bug(
        "the Trainer decays Qwen2's norms",
        "transformers pull 35927",
        "decay",
        V4_47,
        (),
        None,
        "which groups decay is written down, not judged: no configuration says which should",
        given={"family": "Qwen2"},
        parts="local",  # that release counts tokens per rank, too, which comes first
    ),
    Bug(
        "the last short window of a pass loses micro-batches",
        "transformers pull 37923",
        "last_window",
        V4_46,
        (),
        None,
        "a pass that ends early is no fault of the data's order: many loops end it on purpose",
        parts="rows",
        parts_at=2,
    ),
    Bug(
        "skip_first_batches goes on in the first pass's order",
        "accelerate pull 4071",
        "continued",
        ("accelerate==1.14.0",),
        (),
        "low-coverage",
        parts="rows",
        parts_at=10,
    ),
)


def with_trl(version: str) -> tuple[str, ...]:
    """A TRL release on transformers of its time."""
    return hub("4.52.4", "0.21.0", "0.33.0", "1.7.0", f"trl=={version}")


TRL = (
    *(
        Bug(
            f"{kind}'s loss is not divided by the accumulation",
            f"TRL pull {pull}",
            "pairs",
            with_trl(wrong),
            with_trl(right),
            "objective-mismatch",
            given={"kind": kind},
            parts="loss",
        )
        for kind, pull, wrong, right in (
            ("DPO", 2615, "0.13.0", "0.14.0"),
            ("CPO", 2645, "0.13.0", "0.14.0"),
            ("ORPO", 3716, "0.18.1", "0.20.0"),
        )
    ),
    Bug(
        "SFT counts tokens per rank, and averages over ranks",
        "TRL pull 3538",
        "tokens",
        with_trl("0.18.1"),
        with_trl("0.20.0"),
        None,
        "by that release's setting each rank counts its own items; how their weights differ is in the records",
        given={"kind": "SFT"},
        parts="local",
    ),
    Bug(
        "SFT trains no row's end where padding is the end's token",
        "TRL pull 3200",
        "sft_labels",
        with_trl("0.16.0"),
        with_trl("0.17.0"),
        "batch-suspect",
        given={"chat": False},
        beside="objective-mismatch",  # transformers 4.52.4 counts each row's first label: 16 rows, 16 items too many
        parts="rows",
    ),
    Bug(
        "SFT begins every chat twice",
        "TRL pull 3328",
        "sft_labels",
        with_trl("0.16.0"),
        with_trl("0.17.0"),
        "batch-suspect",
        given={"chat": True},
        beside="objective-mismatch",  # transformers 4.52.4 counts each row's first label: 16 rows, 16 items too many
        parts="rows",
    ),
)
ADAPTERS = (
    Bug(
        "alpha_pattern is lost beside rank_pattern",
        "peft pull 2195",
        "scaled_adapters",
        ("peft==0.13.2", *V4_47),
        ("peft==0.14.0", *V4_47),
        "update-mismatch",
        parts="local",
    ),
    Bug(
        "layers_to_transform takes an expert's number for the layer's",
        "peft pull 3318",
        "moved_adapters",
        ("peft==0.19.1",),
        ("peft==0.20.0",),
        "update-mismatch",
        parts="local",
    ),
    Bug(
        "DPO that keeps the end keeps padding and cuts the text",
        "TRL pull 3398",
        "unattended",
        with_trl("0.17.0"),
        with_trl("0.18.1"),
        "batch-suspect",
        parts="rows",
    ),
    Bug(
        "DPO ends a chat that its template has ended once more",
        "TRL pull 4908",
        "ended_twice",
        ("trl==0.27.0", *V4_57),
        ("trl==0.28.0", *V4_57),
        "batch-suspect",
        parts="rows",
    ),
    Bug(
        "from_pretrained initialises the loaded weights of a script's own class again",
        "transformers issue 46620",
        "kept_weights",
        ("transformers==5.12.0", "tokenizers==0.22.1", "huggingface_hub==1.9.0", "httpx==0.28.1", "httpcore==1.0.9"),
        (),
        "weights-mismatch",
        parts="weights",
    ),
    Bug(
        "SoftmaxLoss trains a classifier of its own on each rank",
        "in sentence-transformers 6.2.0 itself",
        "own_classifier",
        ("sentence-transformers==6.2.0",),
        None,
        "unreduced-gradient",
    ),
)
LIST: tuple[Bug, ...] = (*DEEPSPEED, *TRAINER, *TRL, *ADAPTERS)
