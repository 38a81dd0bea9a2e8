"""Note an optimizer whose step counter is ahead of its moments, so that it corrects their bias as in later steps.

Where the counter is past its beginning at the first step, and all moments are 0, something has stepped the optimizer
without gradients. A resumed training has moments.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_silent.maths.optimizers import Elements, Update, late_correction, steps_without_gradient
from ds_silent.rules.rule import Breach


def late_count(kind: str, corrected: Sequence[tuple[Update, Elements]], since: int) -> Breach | None:
    """Return the note on the first call of an optimizer; None where its counter is right.

    Args:
        kind: of the optimizer.
        corrected: all tensors of that call whose bias is corrected, with their settings.
    """
    late = steps_without_gradient([old for _, old in corrected])
    if not late:
        return None
    first, second, third = (f"{late_correction(corrected[0][0], step, late):.3g}" for step in (1, 2, 3))
    return Breach(
        key=f"update:{kind}:count",
        kind="update-mismatch",
        severity="info",
        where="step counter",
        message=f"{kind} counts {late} step{'s' * (late > 1)} more than it has taken: its counter moved on while its "
        "moments stayed 0, as in a step without gradients. So its bias correction is that of later steps: its first "
        f"three updates are {first}, {second} and {third} times what the formula gives for steps 1, 2 and 3.",
        remedy="Do nothing: it is over after a few steps. DeepSpeed begins so in stage 0 with bf16 and fp16, not in "
        "stages 1 to 3. For the same updates set state['step'] of the optimizer at the bottom to 0 before training.",
        since=since,
    )
