"""What an ordered reduction cannot work with is refused before anything starts, and what it keeps is said."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"zero_optimization": {"stage": 2}}, "ZeRO stage 2"),
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "overlap_comm true"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "round_robin_gradients true"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, 'grad_accum_dtype "fp32"'),
        ({"fp16": {"enabled": True}}, "fp16.enabled true"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled true"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation false"),
        ({"gradient_accumulation_steps": 6}, "gradient_accumulation_steps 6"),
        ({"gradient_allreduce_op": "Sum"}, 'gradient_allreduce_op "sum"'),
    ],
)
def test_refusals_name_what_and_the_remedy(change: dict[str, Any], named: str) -> None:
    from ds_silent.config import ConfigError, parse
    from ds_silent.frameworks.deepspeed.refusals import refuse_unsupported_config

    config = {"silent_consistency": {"reduction": "ordered"}, **change}
    with pytest.raises(ConfigError) as refused:
        refuse_unsupported_config(config, parse(config))
    sentence = str(refused.value)
    assert (
        sentence.startswith(f'silent_consistency.reduction "ordered" does not work with {named}') or named in sentence
    )
    assert ", because " in sentence
    assert sentence.endswith(', or "native"')
    native = {**config, "silent_consistency": {}}
    refuse_unsupported_config(native, parse(native))


def test_what_can_work_is_not_refused() -> None:
    from ds_silent.config import parse
    from ds_silent.frameworks.deepspeed.refusals import refuse_unsupported_config

    for zero in ({"stage": 0, "overlap_comm": True}, {"stage": 1, "offload_optimizer": {"device": "none"}}):
        config = {"zero_optimization": zero, "silent_consistency": {"reduction": "ordered"}}
        refuse_unsupported_config(config, parse(config))


@pytest.mark.parametrize(
    ("pairing", "steps", "kept"),
    [
        ("contiguous", 8, "up to 4 fp32 gradients"),
        ("interleaved", 8, "up to 5 fp32 gradients"),
        ("contiguous", 1, "one fp32 gradient"),
        ("interleaved", 1, "one fp32 gradient"),
    ],
)
def test_the_plan_says_what_is_kept_and_that_bits_change(pairing: str, steps: int, kept: str) -> None:
    from ds_silent.commands.forecast import forecast_lines
    from ds_silent.config import parse

    block = {"reduction": "ordered", "ordered": {"micro_batches": pairing}, "direction": {"method": "exact"}}
    config = {"gradient_accumulation_steps": steps, "silent_consistency": block}
    text = "\n".join(forecast_lines(parse(config), config, 8, 2**20))
    assert f"keeps {kept} of 4 MiB where DeepSpeed accumulates one" in text
    assert "exchanges pieces within 64 MiB" in text
    assert "nothing more is sent" in text
    assert "changes     the reduction's last bits" in text
    assert "changes     nothing" not in text
    native = "\n".join(forecast_lines(parse({"silent_consistency": {}}), {"silent_consistency": {}}, 8, 2**20))
    assert "changes     nothing" in native
    assert "ordered" not in native
