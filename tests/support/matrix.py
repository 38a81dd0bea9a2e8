"""The cells of the configuration matrix: a covering subset for every run, and all of them for ``make test-matrix``."""

from __future__ import annotations

from itertools import product

from tests.support.training import Case

FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}

COVERING = (
    Case(),
    Case(stage=1, accumulation=4),
    Case(stage=2, accumulation=4),
    Case(stage=3, accumulation=2),
    Case(dtype="bf16", accumulation=2),
    Case(stage=1, dtype="bf16", accumulation=2, top=FP32_ACCUMULATION),
    Case(stage=2, dtype="bf16", zero={"overlap_comm": True, "contiguous_gradients": True}),
    Case(stage=3, dtype="bf16"),
    Case(stage=1, accumulation=2, zero={"overlap_comm": True}, clipping=1.0),
    Case(stage=2, accumulation=2, zero={"contiguous_gradients": False, "reduce_scatter": False}),
    Case(dtype="fp16"),
    Case(stage=2, dtype="fp16", accumulation=2),
    Case(stage=1, accumulation=2, zero=OFFLOAD),
    Case(accumulation=3, no_sync=True),
    Case(accumulation=2, unused="micro"),
    Case(unused="rank"),
    Case(stage=1, accumulation=2, checkpointing="reentrant"),
    Case(stage=2, checkpointing="non-reentrant"),
    Case(stage=2, accumulation=2, torch_style=True),
    Case(method="exact", accumulation=2),
    Case(method="exact", stage=2, accumulation=2),
    Case(method="exact", stage=1, zero={"overlap_comm": True}),
    Case(exact_interval=2, per_layer=True),
    Case(method="off", stage=1),
    Case(interval=3),
)


def _supported(case: Case) -> bool:
    """DeepSpeed's own limits: what it refuses or computes wrongly without ds_silent is not our case."""
    if case.no_sync and case.stage > 1:
        return False  # "no_sync context manager is incompatible with gradient partitioning logic"
    if case.unused == "rank" and case.stage:
        return False  # its buckets then differ in size between ranks, and the reduction dies
    if case.unused == "micro" and case.zero.get("overlap_comm") and case.stage == 1:
        return False  # it never reduces a gradient whose hook does not fire at the boundary
    if case.torch_style and (case.stage == 0 or case.accumulation > 1):
        return False  # raises at stage 0; scales some outputs by the accumulation steps and some not
    if case.top and not (case.dtype == "bf16" and case.stage == 1):
        return False  # grad_accum_dtype: only where it selects the BF16_Optimizer
    return not (case.zero.get("offload_optimizer") and case.stage == 0)


FULL = tuple(
    case
    for case in (
        *(
            Case(stage=stage, dtype=dtype, accumulation=accumulation, zero=zero, top=top)
            for stage, dtype, accumulation, zero, top in product(
                (0, 1, 2, 3),
                ("fp32", "bf16", "fp16"),
                (1, 4),
                (
                    {},
                    {"overlap_comm": True},
                    {"contiguous_gradients": False},
                    {"reduce_scatter": False},
                    OFFLOAD,
                ),
                ({}, FP32_ACCUMULATION),
            )
            if stage or not zero
        ),
        *(
            Case(stage=stage, dtype=dtype, accumulation=2, method=method, **special)
            for stage, dtype, method, special in product(
                (0, 1, 2, 3),
                ("fp32", "bf16"),
                ("sketch", "exact"),
                (
                    {"checkpointing": "reentrant"},
                    {"checkpointing": "non-reentrant"},
                    {"torch_style": True},
                    {"no_sync": True},
                    {"unused": "micro"},
                    {"unused": "rank"},
                    {"clipping": 1.0},
                    {"per_layer": True},
                ),
            )
        ),
    )
    if _supported(case)
)
