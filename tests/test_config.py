"""Every mistake in the block is one sentence; everything the block may hold is accepted."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from ds_silent.config import ConfigError, EffectsConfig, SilentConsistencyConfig, find_block, parse
from ds_silent.config.block_file import load_ds_config, under_its_name

NAN = float("nan")


def sentence(block: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse({"train_batch_size": 8, "silent_consistency": block})
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_the_design_s_own_block_is_accepted() -> None:
    config = parse(
        {
            "silent_consistency": {
                "enabled": True,
                "interval": 1,
                "output_dir": "runs/my-run",
                "direction": {"method": "sketch", "sketch_size": 16384, "exact_interval": 0, "per_layer": False},
                "coverage": True,
                "preflight": True,
                "rules": True,
                "probe": False,
                "detectors": {"enabled": True, "false_alarms_per_million_steps": 1.0},
                "integrity": {"aggregation": True, "replica_interval": 100},
                "respond": {"on_aggregation_error": "report", "on_replica_drift": "report"},
                "resync": {"mode": "off", "interval": 100, "state": "all"},
                "reduction": "native",
                "tensorboard": True,
            }
        }
    )
    assert config is not None
    assert config.output_dir == "runs/my-run"
    assert config.direction.exact_memory_mb == 64
    defaults = parse({"silent_consistency": {"output_dir": "runs/my-run"}})
    assert config == defaults


def test_other_values_arrive() -> None:
    config = parse(
        {
            "silent_consistency": {
                "interval": 10,
                "direction": {"method": "exact", "sketch_size": 256, "exact_interval": 5, "exact_memory_mb": 1},
                "detectors": {"false_alarms_per_million_steps": 2},
                "tensorboard": False,
            }
        }
    )
    assert config is not None
    assert (config.interval, config.tensorboard) == (10, False)
    direction = config.direction
    assert (direction.method, direction.sketch_size, direction.exact_interval) == ("exact", 256, 5)
    assert direction.exact_memory_mb == 1
    assert config.detectors.false_alarms_per_million_steps == 2.0


@pytest.mark.parametrize("ds_config", [{}, {"zero_optimization": {"stage": 1}, "train_batch_size": "auto"}])
def test_absent_block(ds_config: dict[str, Any]) -> None:
    assert find_block(ds_config) is None
    assert parse(ds_config) is None


def test_disabled_is_a_way_out_even_of_a_wrong_block() -> None:
    assert parse({"silent_consistency": {"enabled": False, "interval": -1, "nonsense": 1}}) is None


def test_auto_elsewhere_is_none_of_our_business() -> None:
    assert parse({"train_batch_size": "auto", "optimizer": {"params": {"lr": "auto"}}, "silent_consistency": {}})


def test_a_configuration_is_frozen() -> None:
    config = parse({"silent_consistency": {}})
    assert config is not None
    with pytest.raises(ValueError, match="frozen"):
        config.interval = 2
    with pytest.raises(ValueError, match="frozen"):
        config.direction.method = "off"


WRONG: list[tuple[str, Any, str]] = [
    ("enabled", "yes", "must be true or false"),
    ("enabled", 1, "must be true or false"),
    ("enabled", None, "must be true or false"),
    ("interval", 0, "must be a whole number, at least 1"),
    ("interval", -3, "must be a whole number, at least 1"),
    ("interval", True, "must be a whole number, at least 1"),
    ("interval", 1.5, "must be a whole number, at least 1"),
    ("interval", "1", "must be a whole number, at least 1"),
    ("interval", NAN, "must be a whole number, at least 1"),
    ("output_dir", "", "must be the name of a directory"),
    ("output_dir", "  ", "must be the name of a directory"),
    ("output_dir", "a\0b", "must be the name of a directory"),
    ("output_dir", 3, "must be the name of a directory"),
    ("output_dir", None, "must be the name of a directory"),
    ("direction.method", "Sketch", 'must be "sketch", "exact" or "off"'),
    ("direction.method", False, 'must be "sketch", "exact" or "off"'),
    ("direction.sketch_size", 1000, "must be a power of two between 256 and 1048576"),
    ("direction.sketch_size", 128, "must be a power of two between 256 and 1048576"),
    ("direction.sketch_size", 2_097_152, "must be a power of two between 256 and 1048576"),
    ("direction.sketch_size", 0, "must be a power of two between 256 and 1048576"),
    ("direction.sketch_size", -1024, "must be a power of two between 256 and 1048576"),
    ("direction.sketch_size", True, "must be a power of two between 256 and 1048576"),
    ("direction.sketch_size", 1024.0, "must be a power of two between 256 and 1048576"),
    ("direction.sketch_size", "16384", "must be a power of two between 256 and 1048576"),
    ("direction.exact_interval", -1, "must be a whole number, at least 0"),
    ("direction.exact_memory_mb", 0, "must be a whole number, at least 1 and at most 65536"),
    ("direction.exact_memory_mb", 65_537, "must be a whole number, at least 1 and at most 65536"),
    ("direction.per_layer", "true", "must be true or false"),
    ("coverage", 0, "must be true or false"),
    ("preflight", "on", "must be true or false"),
    ("rules", 1, "must be true or false"),
    ("probe", "yes", "must be true or false"),
    ("detectors.enabled", [], "must be true or false"),
    ("detectors.dealt", "unknown", 'must be null, "random" or "own-shard"'),
    *(
        (f"effects.{name}", -0.1, "must be a number, at least 0 and at most 1000")
        for name in EffectsConfig.model_fields
    ),
    ("detectors.stop_on", "always", 'must be "never", "error" or "warning"'),
    ("detectors.false_alarms_per_million_steps", 0, "must be a number greater than 0 and at most 1000000"),
    ("detectors.false_alarms_per_million_steps", -1.0, "must be a number greater than 0 and at most 1000000"),
    ("detectors.false_alarms_per_million_steps", 1e7, "must be a number greater than 0 and at most 1000000"),
    ("detectors.false_alarms_per_million_steps", NAN, "must be a number greater than 0 and at most 1000000"),
    ("detectors.false_alarms_per_million_steps", float("inf"), "must be a number greater than 0"),
    ("detectors.false_alarms_per_million_steps", True, "must be a number greater than 0 and at most 1000000"),
    ("integrity.aggregation", {}, "must be true or false"),
    ("integrity.reread", 1, "must be true or false"),
    ("integrity.replica_interval", -1, "must be a whole number, at least 0"),
    ("respond.on_aggregation_error", "ignore", 'must be "report", "retry" or "stop"'),
    ("respond.on_replica_drift", "retry", 'must be "report", "majority", "mean" or "stop"'),
    ("respond.retries", 0, "must be a whole number, at least 1 and at most 100"),
    ("respond.on_failed_retry", "hope", 'must be "report" or "stop"'),
    ("ordered.micro_batches", "random", 'must be "contiguous" or "interleaved"'),
    ("ordered.memory_mb", 0, "must be a whole number, at least 1 and at most 65536"),
    ("resync.mode", "sometimes", 'must be "off", "periodic" or "dynamic"'),
    ("resync.interval", 0, "must be a whole number, at least 1"),
    ("resync.state", "some", 'must be "all" or "parameters"'),
    ("reduction", "tree", 'must be "native" or "ordered"'),
    ("trace", True, "must be an object in braces"),
    ("trace.interval", 0, "must be a whole number, at least 1"),
    ("trace.size", 32, "must be a power of two between 64 and 16384"),
    ("trace.size", 100, "must be a power of two between 64 and 16384"),
    ("tensorboard", "no", "must be true or false"),
    ("alerts", 3, "must be a list of at most 16 objects in braces"),
    ("metrics_port", -1, "must be a whole number, at least 0 and at most 65535"),
    ("metrics_port", 65_536, "must be a whole number, at least 0 and at most 65535"),
    ("metrics_port", "9400", "must be a whole number, at least 0 and at most 65535"),
    ("metrics_address", "", "must be an address of rank 0's host"),
    ("metrics_address", "127.0.0.1/x", "must be an address of rank 0's host"),
    ("metrics_address", None, "must be an address of rank 0's host"),
    ("places", "", "must be the path of a JSON file, or null"),
    ("places", " ", "must be the path of a JSON file, or null"),
    ("places", 3, "must be the path of a JSON file, or null"),
    ("places", {"node1": "A"}, "must be the path of a JSON file, or null"),
    ("direction", 3, "must be an object in braces"),
    ("direction", None, "must be an object in braces"),
    ("direction", [], "must be an object in braces"),
    ("detectors", "on", "must be an object in braces"),
    ("respond", True, "must be an object in braces"),
]


def nested(name: str, value: Any) -> dict[str, Any]:
    *outer, key = name.split(".")
    block: dict[str, Any] = {key: value}
    for part in reversed(outer):
        block = {part: block}
    return block


@pytest.mark.parametrize(("name", "value", "bound"), WRONG)
def test_wrong_value(name: str, value: Any, bound: str) -> None:
    message = sentence(nested(name, value))
    assert message.startswith(f"silent_consistency.{name} {bound}")
    assert f"got {json.dumps(value)}; " in message  # the value, and a remedy behind it
    assert "more)" not in message


def all_fields() -> list[str]:
    names = []
    for key, value in SilentConsistencyConfig().model_dump().items():
        names += [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key]
    return names


def test_every_field_has_a_wrong_value_above() -> None:
    assert set(all_fields()) <= {name for name, _, _ in WRONG}


@pytest.mark.parametrize("name", [*all_fields(), "direction", "resync"])
def test_auto_is_refused_and_not_dropped(name: str) -> None:
    assert sentence(nested(name, "auto")).startswith(f'silent_consistency.{name} must not be "auto"')


def test_the_remedy_for_a_sketch_size_is_the_nearest_power_of_two() -> None:
    assert sentence({"direction": {"sketch_size": 1000}}) == (
        "silent_consistency.direction.sketch_size must be a power of two between 256 and 1048576, got 1000; "
        "the nearest is 1024, the default 16384"
    )
    assert sentence({"direction": {"sketch_size": 16000}}).endswith("the nearest is 16384")
    assert "the nearest is 1048576" in sentence({"direction": {"sketch_size": 10**400}})
    assert "the nearest is 256" in sentence({"direction": {"sketch_size": -(10**9)}})


@pytest.mark.parametrize("power", range(8, 21))
def test_every_power_of_two_is_accepted(power: int) -> None:
    config = parse({"silent_consistency": {"direction": {"sketch_size": 2**power}}})
    assert config is not None
    assert config.direction.sketch_size == 2**power


@pytest.mark.parametrize(
    ("block", "where", "guess"),
    [
        ({"intervall": 1}, "silent_consistency", "interval"),
        ({"outputDir": "x"}, "silent_consistency", "output_dir"),
        ({"output-dir": "x"}, "silent_consistency", "output_dir"),
        ({"direction": {"sketchsize": 256}}, "silent_consistency.direction", "sketch_size"),
        ({"respond": {"on_replica_drifts": "report"}}, "silent_consistency.respond", "on_replica_drift"),
        ({"Tensorboard": True}, "silent_consistency", "tensorboard"),
    ],
)
def test_unknown_key_with_a_near_one(block: dict[str, Any], where: str, guess: str) -> None:
    message = sentence(block)
    assert message.startswith(f"{where} has no key ")
    assert message.endswith(f'did you mean "{guess}"?')


@pytest.mark.parametrize("key", ["zzz", "strict", "self", "model_config", "__class__", ""])
def test_unknown_key_without_a_near_one_lists_the_keys(key: str) -> None:
    message = sentence({"direction": {key: 1}})
    assert message.startswith(f'silent_consistency.direction has no key "{key}"; the keys here are method, sketch_size')


def test_a_key_that_is_no_text() -> None:
    assert sentence({1: 2}).startswith("silent_consistency has no key 1; ")


def test_every_mistake_is_named() -> None:
    message = sentence({"intervall": 5, "colour": "red"})
    assert message == f'{sentence({"intervall": 5})} (and 1 more: no key "colour")'
    message = sentence({"interval": 0, "direction": {"sketch_size": 1000, "methud": "exact"}, "tensorboard": "auto"})
    assert message == (
        'silent_consistency.direction has no key "methud"; did you mean "method"? (and 3 more: '
        'tensorboard must not be "auto", because nothing here is filled in later; interval must be a whole number, '
        "at least 1, got 0; "
        "direction.sketch_size must be a power of two between 256 and 1048576, got 1000)"
    )


def test_of_many_mistakes_the_first_five_are_named() -> None:
    message = sentence({f"key{number}": 1 for number in range(40)})
    assert [f'"key{number}"' in message for number in range(6)] == [True] * 5 + [False]
    assert message.endswith(' (and 39 more: no key "key1"; no key "key2"; no key "key3"; no key "key4"; ...)')


def test_hostile_text_stays_short_and_inert() -> None:
    message = sentence({"output_dir\x1b[2J" + "x" * 10_000: 1})
    assert "\x1b" not in message
    assert "\\u001b" in message
    assert sentence({"direction": {"method": "y" * 10_000}}).count("y") < 90


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"respond": {"on_aggregation_error": "retry"}, "interval": 10},
            ('respond.on_aggregation_error "retry"', "interval must be 1, got 10"),
        ),
        (
            {"respond": {"on_aggregation_error": "stop"}, "direction": {"method": "off"}},
            ('respond.on_aggregation_error "stop"', 'direction.method "off"'),
        ),
        (
            {"respond": {"on_aggregation_error": "retry"}, "integrity": {"aggregation": False}},
            ('respond.on_aggregation_error "retry"', "integrity.aggregation false"),
        ),
        (
            {"respond": {"on_replica_drift": "majority"}, "integrity": {"replica_interval": 0}},
            ('respond.on_replica_drift "majority"', "integrity.replica_interval must be at least 1, got 0"),
        ),
        (
            {"respond": {"on_replica_drift": "mean"}, "resync": {"mode": "periodic"}},
            ('resync.mode "periodic"', 'respond.on_replica_drift "mean"', "use one of them"),
        ),
    ],
)
def test_a_protection_that_could_not_work_is_refused(block: dict[str, Any], words: tuple[str, ...]) -> None:
    said = sentence(block)
    for phrase in words:
        assert phrase in said


@pytest.mark.parametrize(
    "block",
    [
        {"respond": {"on_aggregation_error": "retry", "on_replica_drift": "majority"}},
        {"respond": {"on_replica_drift": "stop"}, "resync": {"mode": "dynamic"}},
        {"reduction": "ordered", "ordered": {"micro_batches": "interleaved"}},
    ],
)
def test_responses_that_go_together(block: dict[str, Any]) -> None:
    assert parse({"silent_consistency": block}) is not None


@pytest.mark.parametrize(
    "name",
    [
        "silent_consistancy",
        "silent-consistency",
        "SilentConsistency",
        "silentConsistency",
        "silent consistency",
        "Silent_Consistency",
        "silent_consistency ",
        "silent_consistencies",
        "silent_inconsistency",
        "slient_consistency",
        "ds_silent",
        "silent",
    ],
)
@pytest.mark.parametrize("beside", [{}, {"silent_consistency": {}}])
def test_near_miss_of_the_block_s_name(name: str, beside: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_block({**beside, "train_batch_size": 8, name: {"enabled": True}})
    assert str(caught.value) == (
        f'the ds_config has a key {json.dumps(name)}, which nothing reads; did you mean "silent_consistency"?'
    )


@pytest.mark.parametrize(
    "name", ["_silent_consistency", "//silent_consistency", "#silent_consistency", "data_efficiency", "compression"]
)
def test_not_a_near_miss(name: str) -> None:
    assert find_block({name: {}}) is None


@pytest.mark.parametrize("block", [True, None, [], "on", 1])
def test_the_block_must_be_an_object(block: Any) -> None:
    assert sentence(block).startswith(f"silent_consistency must be an object in braces, got {json.dumps(block)}")


def test_load_a_dict_a_path_and_base64(tmp_path: Path) -> None:
    ds_config = {"train_batch_size": 8, "silent_consistency": {"interval": 2}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ds_config))
    encoded = base64.urlsafe_b64encode(json.dumps(ds_config).encode()).decode()
    loaded = [load_ds_config(ds_config), load_ds_config(path), load_ds_config(str(path)), load_ds_config(encoded)]
    assert loaded == [ds_config] * 4
    assert loaded[0] is not ds_config


@pytest.mark.parametrize(
    ("held", "alone"),
    [
        ({"interval": 5}, True),
        ({"interval": 5, "tensorboard": False, "directon": {}}, True),  # and one of its keys is misspelt
        ({}, False),
        ({"tensorboard": {"enabled": True}}, False),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 1}}, False),
        ({"silent_consistency": {"interval": 5}}, False),
    ],
)
def test_a_file_with_the_block_alone_is_told_from_a_ds_config(held: dict[str, Any], alone: bool) -> None:
    assert under_its_name(held) == ({"silent_consistency": held} if alone else held)


def test_comments_and_trailing_commas_as_deepspeed_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{\n  // how often\n  "silent_consistency": {"interval": 3,},  # here\n}\n')
    config = parse(load_ds_config(path))
    assert config is not None
    assert config.interval == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1', "is not JSON: "),
        ('{"a": 1} {', "is not JSON: "),
        ("[1, 2]", "must hold one object in braces, got [1, 2]"),
        ("just words", "must hold one object in braces"),
        ('{"a": 1, "a": 2}', 'has the key "a" twice in one object'),
        ('{"silent_consistency": {"interval": 1, "interval": 2}}', 'has the key "interval" twice in one object'),
        ('{"a": ' + "[" * 100_000, "cannot be read as JSON (RecursionError)"),
    ],
    ids=["open", "more", "list", "words", "twice", "twice-inside", "deep"],
)
def test_a_broken_file(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_ds_config(path)
    message = str(caught.value)
    assert message.startswith(f'the ds_config file "{path}" ')
    assert expected in message
    assert "\n" not in message


def test_a_missing_file_a_directory_and_binary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'there is no ds_config file "no/such.json"; check the path'):
        load_ds_config("no/such.json")
    with pytest.raises(ConfigError, match=r'there is no ds_config file "nosuchconfig"; check the path'):
        load_ds_config("nosuchconfig")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        load_ds_config(tmp_path)
    binary = tmp_path / "weights.bin"
    binary.write_bytes(b"\x80\xff\xfe")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        load_ds_config(binary)
    with pytest.raises(ConfigError, match="must be a dict or the path of a JSON file, got 3"):
        load_ds_config(3)  # type: ignore[arg-type]


def test_base64_of_a_broken_object() -> None:
    encoded = base64.urlsafe_b64encode(b'{"a": 1, "a": 2}').decode()
    with pytest.raises(ConfigError, match=r'the base64 ds_config has the key "a" twice'):
        load_ds_config(encoded)
