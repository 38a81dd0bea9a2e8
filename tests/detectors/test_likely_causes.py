"""From one rank's numbers to the likelier cause: a table of what faults do to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_silent.detectors.likely_causes import Symptoms, causes_in_words, in_words, likely_causes

AGREE = {"cosine": 0.11, "peers_cosine": 0.10}
APART = {"cosine": 0.01, "peers_cosine": 0.10, "cosine_noise": 0.02}
FAINT = {"cosine": -0.063, "peers_cosine": 0.042, "cosine_noise": 0.04}  # noise makes such cosines
TURNED = {**APART, "past_cosine": 0.1, "past_peers_cosine": 0.1}  # later: it was like the others before
SURELY = {"loss_noise": 0.005, "norm_noise": 0.005}
LOST = {"cosine": 0.01, "peers_cosine": 0.3}
TOKENS = {"label_tokens": 189.0, "peers_label_tokens": 180.0}


@pytest.mark.parametrize(
    ("seen", "first"),
    [
        ({"loss": 193.0, "norm": 170.0, **AGREE, **TOKENS}, "loss-summed"),
        ({"loss": 193.0, "norm": 200.0, **AGREE}, "loss-multiplied"),
        ({"loss": 193.0, "norm": 200.0}, "loss-multiplied"),  # the direction is not known
        ({"loss": 48.0, "norm": 47.0, **AGREE, **TOKENS, "micro_batches": 4, "peers_micro_batches": 4}, "loss-summed"),
        ({"loss": 8.2, "norm": 7.7, **AGREE, "rows": 8, "peers_rows": 8}, "loss-summed-over-rows"),
        ({"loss": 4.0, "norm": 4.2, **AGREE, "micro_batches": 4, "peers_micro_batches": 4}, "loss-not-divided"),
        ({"loss": 1 / 4, "norm": 1 / 4.2, **AGREE, "micro_batches": 4, "peers_micro_batches": 4}, "loss-not-divided"),
        ({"loss": 8.0, "norm": 8.0, **AGREE, "ranks": 8}, "loss-times-ranks"),
        ({"loss": 1.5, "norm": 1.5, **AGREE}, "loss-multiplied"),
        ({"loss": 1.0, "norm": 2.0, **AGREE}, "gradient-counted"),
        ({"loss": 1.0, "norm": 1.5, **AGREE}, "gradient-scaled"),
        ({"loss": 1.0, "norm": 0.3, **AGREE}, "clipped-before-reduction"),
        ({"loss": 1.0, "norm": 1000.0, **AGREE}, "gradient-scaled"),
        ({"loss": 1.0, "norm": 1.0, **TURNED}, "corrupted-gradient"),
        ({"loss": 1.0, "norm": 1.4, **TURNED}, "corrupted-gradient"),
        # from the first step on: an untrained model has the same loss on wrong labels
        ({"loss": 1.0, "norm": 0.87, **APART, "loss_noise": 0.005, "norm_noise": 0.02}, "other-data"),
        # a loss that is a little higher, too: what changes a gradient behind it would leave it as it is
        ({"loss": 1.06, "norm": 1.0, **TURNED, "loss_noise": 0.02}, "other-data"),
        ({"loss": 1.03, "norm": 1.0, **TURNED, "loss_noise": 0.02}, "corrupted-gradient"),
        ({"loss": 0.94, "norm": 1.0, **TURNED, "loss_noise": 0.02}, "corrupted-gradient"),
        # no factor makes the loss larger and its gradient smaller
        ({"loss": 1.04, "norm": 0.887, **LOST, "loss_noise": 0.005, "norm_noise": 0.02}, "other-data"),
        ({"loss": 0.96, "norm": 1.13, **LOST, "loss_noise": 0.005, "norm_noise": 0.02}, "easier-data"),
        ({"loss": 0.95, "norm": 2.0, **AGREE, "loss_noise": 0.005, "norm_noise": 0.02}, "gradient-counted"),
        ({"loss": 1.0, "norm": 1.0, "cosine": -0.1, "peers_cosine": 0.1, "cosine_noise": 0.02}, "sign"),
        # random labels on one of two ranks: a wrong sign would not raise a loss of the same weights
        ({"loss": 1.39, "norm": 1.06, "cosine": -0.74, "past_cosine": 0.3, "cosine_noise": 0.05}, "other-data"),
        ({"loss": 0.72, "norm": 0.95, "cosine": -0.74, "past_cosine": 0.3, "cosine_noise": 0.05}, "sign"),
        ({"loss": 1.6, "norm": 1.7, **APART}, "other-data"),
        ({"loss": 1.6, "norm": 1.0, **AGREE}, "other-data"),
        ({"loss": 0.5, "norm": 0.8, **AGREE}, "easier-data"),
        ({"loss": 1.0, "norm": 0.7, **AGREE, "rows": 8, "peers_rows": 4}, "batch-size-differs"),
        ({"loss": 1.0, "norm": 1.9, **AGREE, "label_tokens": 45, "peers_label_tokens": 180}, "label-tokens-differ"),
        ({"loss": 4.0, "norm": 4.1, **AGREE, "label_tokens": 720, "peers_label_tokens": 180}, "token-weighting"),
        ({}, "other-data"),
        # its inputs are of another size, whatever loss and norm are: 57 times, a third; twice is what own rows make
        ({"loss": 8.0, "norm": 7.7, **AGREE, "inputs": 57.0}, "inputs-scaled"),
        ({"loss": 1.0, "norm": 0.2, **AGREE, "inputs": 0.3}, "inputs-scaled"),
        ({"loss": 1.0, "norm": 0.3, **AGREE, "inputs": 2.0}, "clipped-before-reduction"),
        # one rank's labels are shuffled: the loss far up, the norm by less or by nearly as much, the gradient elsewhere
        ({"loss": 7.0, "norm": 4.0, **LOST}, "other-data"),
        ({"loss": 7.0, "norm": 4.0, **LOST, "norm_noise": 0.33, "cosine_noise": 0.04}, "other-data"),
        ({"loss": 4.0, "norm": 4.0, **LOST, "cosine_noise": 0.04, "ranks": 4}, "other-data"),
        ({"loss": 7.0, "norm": 4.0}, "other-data"),  # the direction is not known: no factor explains both
        ({"loss": 7.0, "norm": 4.0, "cosine": 0.001, "peers_cosine": 0.002}, "other-data"),
        # the others' own cosines are noise: what they say of a direction counts nothing
        ({"loss": 0.5, "norm": 0.5, **FAINT}, "loss-multiplied"),
        ({"loss": 2.0, "norm": 2.1, **FAINT, "norm_noise": 0.1}, "loss-multiplied"),
        ({"loss": 8.0, "norm": 7.4, **FAINT, "norm_noise": 0.1, "ranks": 8}, "loss-times-ranks"),
        ({"loss": 1 / 3, "norm": 1 / 3, **FAINT, "ranks": 3}, "loss-times-ranks"),
        ({"loss": 2.03, "norm": 1.83, **FAINT, "norm_noise": 0.02, "ranks": 3}, "loss-multiplied"),
        ({"loss": 1.0, "norm": 2.0, **FAINT}, "gradient-counted"),
        ({"loss": 1.0, "norm": 3.6, **FAINT, "ranks": 3}, "gradient-scaled"),
        ({"loss": 4.5, "norm": 4.0, **FAINT, "loss_noise": 0.03, "norm_noise": 0.2, "ranks": 8}, "other-data"),
        ({"loss": 4.49, "norm": 1.66, **FAINT, "norm_noise": 0.3}, "other-data"),
        ({"loss": 1.45, "norm": 0.073, **APART, "norm_constant": True}, "clipped-before-reduction"),
        # a little higher, the norm by as much, and noise in the direction: nobody multiplies a loss by 1.08
        (
            {"loss": 1.08, "norm": 1.05, "cosine": -0.014, "peers_cosine": 0.052, **SURELY, "cosine_noise": 0.04},
            "other-data",
        ),
        ({"loss": 1.08, "norm": 1.05, **FAINT, **SURELY}, "other-data"),
        ({"loss": 1.08, "norm": 1.05, **SURELY}, "other-data"),
        ({"loss": 1.08, "norm": 1.08, **AGREE, **SURELY}, "loss-multiplied"),
        # the loss is multiplied: as far apart as the noise of one step makes them
        ({"loss": 193.0, "norm": 120.0, **LOST, "norm_noise": 0.33, "cosine_noise": 0.1}, "loss-multiplied"),
        ({"loss": 193.0, "norm": 120.0, **AGREE, "norm_noise": 0.33, "cosine_noise": 0.001}, "loss-multiplied"),
        ({"loss": 550.0, "norm": 190.0, **AGREE}, "loss-multiplied"),
        ({"loss": 7.0}, "loss-multiplied"),  # the norm is not known
        ({"loss": 7.0, "norm": 1.0, **AGREE}, "loss-term"),  # a factor on the loss would be one on the norm
        # of a shard of its own: it has always pointed elsewhere
        (
            {
                "loss": 8.0,
                "norm": 8.0,
                "cosine": 0.1,
                "peers_cosine": 0.3,
                "past_cosine": 0.11,
                "past_peers_cosine": 0.31,
                "cosine_noise": 0.01,
            },
            "loss-multiplied",
        ),
        ({"loss": 1.0, "norm": 3.0, "cosine": 0.03, "past_cosine": 0.1, "cosine_noise": 0.03}, "gradient-scaled"),
        # of two ranks there are no others: its own past is what it is measured by
        ({"loss": 7.0, "norm": 6.0, "cosine": 0.01, "past_cosine": 0.3, "cosine_noise": 0.02}, "other-data"),
        ({"loss": 7.0, "norm": 6.0, "cosine": 0.29, "past_cosine": 0.3, "cosine_noise": 0.02}, "loss-multiplied"),
    ],
)
def test_the_likelier_cause_comes_first(seen: dict[str, float], first: str) -> None:
    causes = likely_causes(Symptoms(**seen))  # type: ignore[arg-type]
    assert causes[0].name == first, [cause.name for cause in causes]
    assert len({cause.name for cause in causes}) == len(causes) <= 3


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.05, 0.3])
@pytest.mark.parametrize("factor", [8.66, 5.5, 3.4, 1.4, 1 / 8.66])
def test_what_is_only_near_a_count_is_not_that_count(factor: float, noise: float) -> None:
    counts = {"ranks": 4, "rows": 8, "peers_rows": 8, "micro_batches": 1, "peers_micro_batches": 1}
    for loss in (factor, 1.0):
        seen = Symptoms(loss=loss, norm=factor, **AGREE, **counts, loss_noise=noise, norm_noise=noise)  # type: ignore[arg-type]
        assert "is about" not in causes_in_words(likely_causes(seen))


def test_a_count_is_named_within_the_error_of_the_factor() -> None:
    def first(loss: float, noise: float) -> str:
        counts = {"ranks": 4, "rows": 8, "peers_rows": 8}
        return likely_causes(Symptoms(loss=loss, norm=loss * 1.2, **AGREE, **counts, loss_noise=noise))[0].name  # type: ignore[arg-type]

    assert (first(8.4, 0.02), first(8.4, 0.01)) == ("loss-summed-over-rows", "loss-multiplied")
    assert (first(4.1, 0.01), first(1 / 4.1, 0.01)) == ("loss-times-ranks", "loss-times-ranks")


@pytest.mark.parametrize("direction", [AGREE, FAINT, APART, {}])
def test_hardware_is_never_the_cause_of_one_factor(direction: dict[str, float]) -> None:
    for factor in (1 / 8, 1 / 3, 1 / 2, 1.5, 3.0, 193.0, 1e4):
        causes = likely_causes(Symptoms(loss=factor, norm=factor, **direction))  # type: ignore[arg-type]
        assert "corrupted-gradient" not in {cause.name for cause in causes}


def test_the_words() -> None:
    seen = Symptoms(loss=193.0, norm=190.0, **AGREE, **TOKENS)
    assert in_words(seen) == (
        "loss 193 times theirs, gradient norm 190 times theirs, cosine with them 0.11 (theirs with each other 0.1), "
        "189 label tokens (theirs 180)"
    )
    rescaled = in_words(replace(seen, inputs=10.0))
    assert rescaled.endswith(
        "(theirs with each other 0.1), inputs 10 times theirs (root mean square), 189 label tokens (theirs 180)"
    )
    assert "inputs" not in in_words(replace(seen, inputs=2.9))  # as far as own rows go
    words = causes_in_words(likely_causes(seen))
    assert words.startswith(
        "Most likely: 193 is about its number of label tokens (189): the loss is summed over them, not averaged. Else: "
    )


def test_numbers_that_are_none_are_no_symptoms() -> None:
    for bad in (float("nan"), float("inf"), 0.0, -1.0):
        assert likely_causes(Symptoms(loss=bad, norm=2.0, **AGREE))[0].name == "gradient-counted"
