"""What may stand in ``"to"``, which service it is, and that no sentence holds its secret."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest

from ds_silent.alerts.sink import refuse_unusable_alerts
from ds_silent.config import ConfigError, SilentConsistencyConfig, parse
from ds_silent.config.destination import WrongDestination, masked, parse_destination, resolve
from ds_silent.observing.start import _compared

SECRET = "s3cr3t-T0k3n"


@pytest.mark.parametrize(
    ("to", "form", "shown"),
    [
        (f"https://hooks.slack.com/services/T0/B0/{SECRET}", "slack", "https://hooks.slack.com/…"),
        (f"https://hooks.slack.com/triggers/T0/{SECRET}", "json", "https://hooks.slack.com/…"),
        (f"https://discord.com/api/webhooks/1/{SECRET}", "discord", "https://discord.com/…"),
        (f"https://canary.discord.com/api/v10/webhooks/1/{SECRET}", "discord", "https://canary.discord.com/…"),
        (f"https://x.webhook.office.com/webhookb2/{SECRET}", "teams", "https://x.webhook.office.com/…"),
        (
            f"https://prod-1.westeurope.logic.azure.com:443/workflows/a/triggers/manual/paths/invoke?sig={SECRET}",
            "teams",
            "https://prod-1.westeurope.logic.azure.com:443/…",
        ),
        (f"slack+https://chat.example.org/hooks/{SECRET}", "slack", "https://chat.example.org/…"),
        (f"https://user:{SECRET}@example.org/x?token={SECRET}#{SECRET}", "json", "https://example.org/…"),
        (f"http://[::1]:8080/{SECRET}", "json", "http://[::1]:8080/…"),
        (f"https://discord.com.example.org/api/webhooks/{SECRET}", "json", "https://discord.com.example.org/…"),
        (f"smtp://me:{SECRET}@mail.example.org/a@example.org,b@example.org", "mail", "smtp://mail.example.org/…"),
        (f"command:/opt/page --token {SECRET}", "command", "command:page …"),
        (f"apprise:tgram://{SECRET}:a/b?x={SECRET}", "apprise", "apprise:tgram://…"),
        ("monitor", "monitor", "monitor"),
        ("wandb", "wandb", "wandb"),
        ("comet", "comet", "comet"),
    ],
)
def test_forms(to: str, form: str, shown: str) -> None:
    destination = parse_destination(to)
    assert (destination.form, str(destination)) == (form, shown)
    assert SECRET not in repr(destination)


def test_a_mail_address_has_all_parts() -> None:
    mail = parse_destination(
        "smtps://me%40example.org:p%3Aw@mail.example.org/a@example.org,b@example.org?from=t@x.org"
    ).mail
    assert mail is not None
    assert (mail.host, mail.port, mail.encrypted) == ("mail.example.org", 465, True)
    assert (mail.user, mail.password, mail.sender) == ("me@example.org", "p:w", "t@x.org")
    assert mail.recipients == ("a@example.org", "b@example.org")
    plain = parse_destination("smtp://localhost/a@example.org").mail
    assert plain is not None
    assert (plain.port, plain.sender, plain.user) == (25, "a@example.org", None)


WRONG: list[tuple[Any, str]] = [
    (f"hooks.slack.com/services/{SECRET}", "must be a webhook"),
    (f"https:/hooks.slack.com/{SECRET}", "must be a webhook"),
    (f"ftp://example.org/{SECRET}", "must be a webhook"),
    (f"https:///{SECRET}", "must name a host"),
    (f"https://example.org:{SECRET}/x", "must be a webhook"),
    (f"https://example.org/{SECRET} x", "must have no blanks"),
    (f"https://example.org/{SECRET}\n", "must have no blanks"),
    (f"https://exämple.org/{SECRET}", "must have no blanks and only ASCII"),
    (f"smtp://me:{SECRET}@mail.example.org", "must say whom the mail is for"),
    (f"smtp://me:{SECRET}@mail.example.org/nobody", "must say whom the mail is for"),
    (f"smtp://mail.example.org/a@x.org?password={SECRET}", "must have nothing but from="),
    (f"smtp://mail.example.org/a@x.org%0d%0aBcc:{SECRET}@x.org", "must say whom the mail is for"),
    (f"command:page '{SECRET}", "must have a command whose quotes are closed"),
    ("command:", "must name a program"),
    (f"apprise:{SECRET}", "must be a webhook"),
    (f"apprise:tgram://{SECRET} x", "must be a webhook"),
    (f"apprise:{SECRET}://x", "must be a webhook"),
    ("", "must be a webhook"),
    ("email", "must be a webhook"),
    (SECRET, "must be a webhook"),
    (3, "must be a webhook"),
    (None, "must be a webhook"),
    ([f"https://example.org/{SECRET}"], "must be a webhook"),
    ({"url": SECRET}, "must be a webhook"),
]


@pytest.mark.parametrize(("to", "bound"), WRONG)
def test_what_is_refused_is_a_sentence_without_the_secret(to: Any, bound: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"silent_consistency": {"alerts": [{"to": "wandb"}, {"to": to}]}})
    said = str(caught.value)
    assert said.startswith(f"silent_consistency.alerts[1].to {bound}")
    assert "; " in said
    assert "\n" not in said
    assert len(said) < 400
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("alerts", "said"),
    [
        (
            f"https://example.org/{SECRET}",
            "alerts must be a list of at most 16 objects in braces, got https://example.org/…",
        ),
        ({"to": SECRET}, "alerts must be a list of at most 16 objects in braces, got an object"),
        ([SECRET], "alerts[0] must be an object in braces, got a text of 12 characters"),
        ([{}], 'alerts[0] has no key "to", which must be a webhook'),
        ([{"to": "wandb"}] * 17, "alerts must be a list of at most 16 objects in braces, got 17 of them"),
        ([{"to": "wandb", "level": "errors"}], 'alerts[0].level must be "warning", "error" or "info", got "errors"'),
        ([{"to": "wandb", "at_most_per_hour": 0}], "alerts[0].at_most_per_hour must be a whole number, at least 1 and"),
        ([{"to": "wandb", "timeout": 0}], "alerts[0].timeout must be a number greater than 0 and at most 60, got 0"),
        ([{"to": "wandb", "levle": "error"}], 'alerts[0] has no key "levle"; did you mean "level"?'),
        ([{f"https://example.org/{SECRET}": "error"}], "alerts[0] has no key https://example.org/…; the keys here are"),
        ([{"to": "auto"}], 'alerts[0].to must not be "auto"'),
        ([{"to": f"https://example.org/{SECRET}", "level": "all"}], "alerts[0].level must be"),
    ],
)
def test_mistakes_beside_it(alerts: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"silent_consistency": {"alerts": alerts}})
    assert str(caught.value).startswith(f"silent_consistency.{said}")
    assert SECRET not in str(caught.value)


def config_with(*to: str) -> SilentConsistencyConfig:
    config = parse({"silent_consistency": {"alerts": [{"to": each} for each in to]}})
    assert config is not None
    return config


def test_a_parsed_block_shows_no_secret_and_keeps_it() -> None:
    address = f"https://example.org/{SECRET}"
    config = config_with(address)
    for shown in (repr(config), str(config), json.dumps(config.model_dump(mode="json")), config.model_dump_json()):
        assert SECRET not in shown
    assert config.alerts[0].address == address


def test_ranks_need_not_agree_on_it() -> None:
    mine, other = (_compared(dict, config_with(f"https://{host}/{SECRET}")) for host in ("a.org", "b.org"))
    assert mine == other
    assert SECRET not in json.dumps(mine)


def test_from_the_environment() -> None:
    config = config_with("env:SLACK_URL")
    found = resolve("env:SLACK_URL", {"SLACK_URL": f"https://hooks.slack.com/services/{SECRET}\n"})
    assert (found.form, str(found)) == ("slack", "https://hooks.slack.com/…")
    with pytest.raises(ConfigError) as caught:
        refuse_unusable_alerts(config.alerts, {})
    assert str(caught.value) == (
        "silent_consistency.alerts[0].to must name an environment variable that is set on the host of rank 0 "
        '(SLACK_URL is not), got "env:SLACK_URL"; export SLACK_URL there, or leave the alert out'
    )
    with pytest.raises(ConfigError) as caught:
        refuse_unusable_alerts(config.alerts, {"SLACK_URL": SECRET})
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(WrongDestination, match="not another name"):
        resolve("env:A", {"A": "env:B"})


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_silent.alerts.sink.installed", lambda module: False)
    with pytest.raises(
        ConfigError, match=r"alerts\[0\]\.to must name a tracker that is installed .* pip install comet-ml"
    ):
        refuse_unusable_alerts(config_with("comet").alerts)


def test_apprise_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_silent.alerts.sink.installed", lambda module: False)
    with pytest.raises(ConfigError) as caught:
        refuse_unusable_alerts(config_with(f"apprise:tgram://{SECRET}/x").alerts)
    assert str(caught.value) == (
        "silent_consistency.alerts[0].to must be reached by apprise, which is not installed on the host of rank 0, got "
        '"apprise:tgram://…"; pip install "ds_silent[alerts]" there, or leave the alert out'
    )


@pytest.mark.parametrize("scheme", ["slack", "discord", "tgram", "htps"])
def test_of_a_scheme_that_is_none_of_ours_not_even_the_host_is_shown(scheme: str) -> None:
    with pytest.raises(WrongDestination, match=f"{scheme}://…; see docs/alerts.md") as refused:
        parse_destination(f"{scheme}://{SECRET}/{SECRET}/x")
    assert SECRET.lower() not in str(refused.value).lower()


@pytest.mark.parametrize("value", [True, False, None, 3, 1.5, ""])
def test_what_can_hold_no_secret_is_shown(value: object) -> None:
    assert masked(value) == json.dumps(value)
