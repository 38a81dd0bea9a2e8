"""What a failed collective says of the other ranks; the texts are gloo's and NCCL's own."""

from __future__ import annotations

import pytest

from finetune.lost import lost_peers

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"{GLOO}pair.cc:553] Connection closed by peer [10.0.0.2]:39140. This is typically caused by a crash.",
            "another rank is gone (Connection closed by peer [10.0.0.2]:39140)",
        ),
        (
            f"{GLOO}pair.cc:537] Read error [10.0.0.2]:23715: Connection reset by peer. Check the logs.",
            "another rank is gone (Read error [10.0.0.2]:23715: Connection reset by peer)",
        ),
        (
            f"{GLOO}unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete",
            "nothing has come from another rank for as long as ranks wait "
            "(Timed out waiting 60000ms for recv operation to complete)",
        ),
        (
            "Application timeout caused pair closure",  # gloo, of what waited beside the one that timed out
            "nothing has come from another rank for as long as ranks wait (Application timeout caused pair closure)",
        ),
        (
            "NCCL error: remote process exited or there was a network error",
            "another rank is gone (NCCL error: remote process exited or there was a network error)",
        ),
    ],
)
def test_the_others_are_named_as_the_reason(text: str, said: str) -> None:
    assert lost_peers(RuntimeError(text)) == said


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("size mismatch for layers.0.weight"),
        RuntimeError("[enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing file"),
        RuntimeError("NCCL error: invalid usage"),
        OSError("Connection reset by peer while gloo was reading"),
    ],
)
def test_another_error_is_not_taken_for_it(error: Exception) -> None:
    assert lost_peers(error) is None
