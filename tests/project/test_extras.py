"""Without DeepSpeed, transformers, datasets and matplotlib: what works, and one sentence from what does not."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ds_silent
from ds_silent import extras

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ds_silent"
NOT_THERE = ("deepspeed", "transformers", "datasets", "matplotlib", "accelerate", "tokenizers", "megatron.core")
OF_TORCHMETRICS = ("matplotlib", "transformers", "accelerate", "tokenizers")  # Lightning's, which looks for them
# what Python itself does where a package is not installed: find_spec gives None, an import raises ModuleNotFoundError
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({packages!r})); sys.argv[0] = {name!r}; "
CLI = "from ds_silent.cli import app; app()"
FINETUNE = f"sys.path.insert(0, {str(ROOT / 'launch')!r}); from train import run; sys.exit(run())"
MODULE = "import runpy; runpy.run_module('ds_silent', run_name='__main__', alter_sys=True)"
Told = tuple[int, str, str]
"""Exit code, standard output, standard error."""
DEEPSPEED = ("frameworks/deepspeed/", "drill/train_deepspeed.py")
"""Who may import it: its adapter and the drill's engine."""


def without(program: str, *arguments: str, name: str = "ds-silent", packages: tuple[str, ...] = NOT_THERE) -> Told:
    """What a program says in an environment without ``packages``."""
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(packages=packages, name=name) + program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return found.returncode, found.stdout, found.stderr


def the_sentence(said: str) -> str:
    assert said.count("\n") == 1, said
    assert "Traceback" not in said
    return said.strip()


def test_every_public_name_is_there() -> None:
    for name in ds_silent.__all__:
        assert getattr(ds_silent, name).__name__ == name
    assert set(ds_silent.__all__) <= set(dir(ds_silent))
    with pytest.raises(AttributeError, match="no_such_name"):
        ds_silent.no_such_name  # noqa: B018


def test_the_import_loads_nothing() -> None:
    code, said, wrong = without(
        "import ds_silent; print([name for name in ('torch', 'numpy', 'rich') if name in sys.modules])", packages=()
    )
    assert (code, said.strip()) == (0, "[]"), wrong


def test_what_needs_no_framework_is_there_without_one() -> None:
    names = [name for name in ds_silent.__all__ if name not in ("attach", "initialize")]
    code, said, wrong = without(f"from ds_silent import {', '.join(names)}; print(ConfigError.__name__)")
    assert (code, said.strip()) == (0, "ConfigError"), wrong


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("ds_silent.integrations.huggingface", ("transformers", "accelerate", "tokenizers")),
        ("ds_silent.integrations.lightning", ("lightning", *OF_TORCHMETRICS)),
        ("ds_silent.integrations.lightning_entry", ()),
        ("ds_silent.frameworks.ddp", ()),
        ("ds_silent.frameworks.fsdp2", ()),
        ("ds_silent.frameworks.attach", ()),
    ],
)
@pytest.mark.long
def test_a_way_in_needs_its_own_framework_alone(module: str, needed: tuple[str, ...]) -> None:
    others = {*NOT_THERE, "lightning", "pytorch_lightning", "trl"} - set(needed)
    code, _, wrong = without(f"import {module}", packages=tuple(sorted(others)))
    assert code == 0, wrong


@pytest.mark.parametrize("command", ["", "check", "drill", "numerics"])
def test_the_help(command: str) -> None:
    code, said, wrong = without(CLI, *filter(None, [command]), "--help")
    assert code == 0, wrong
    assert "Usage: " in said


@pytest.mark.long
def test_check_does_what_it_can(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "silent_consistency": {"interval": 5}}))
    code, said, wrong = without(CLI, "check", str(config), "--world-size", "4")
    assert code == 0, wrong
    assert "measures every 5 optimizer steps over 4 ranks" in said
    assert 'needs DeepSpeed, which is not installed: pip install "ds_silent[deepspeed]"' in the_sentence(wrong)
    config.write_text(json.dumps({"silent_consistency": {"intervall": 5}}))
    code, _, wrong = without(CLI, "check", str(config))
    assert code == 2
    assert 'did you mean "interval"?' in wrong


def test_records_are_read(tmp_path: Path) -> None:
    for kind in ("metrics", "events"):
        (tmp_path / f"{kind}.jsonl").write_text("")
    code, said, wrong = without(
        "from ds_silent.sinks.jsonl import read_events, read_metrics; "
        "print(read_metrics(sys.argv[1] + '/metrics.jsonl'), read_events(sys.argv[1] + '/events.jsonl'))",
        str(tmp_path),
    )
    assert (code, said.strip()) == (0, "[] []"), wrong


@pytest.mark.parametrize(
    ("program", "arguments", "exit_code", "what"),
    [
        (CLI, ["drill"], 2, "ds-silent: ds-silent drill"),
        ("import ds_silent; ds_silent.initialize(model=None)", [], 1, "ds_silent: ds_silent.initialize"),
        ("from ds_silent import initialize", [], 1, "ds_silent: ds_silent.initialize"),
    ],
)
def test_what_needs_deepspeed_says_so_in_one_sentence(
    program: str, arguments: list[str], exit_code: int, what: str
) -> None:
    code, _, wrong = without(program, *arguments)
    expected = f'{what} needs DeepSpeed, which is not installed: pip install "ds_silent[deepspeed]"'
    assert the_sentence(wrong) == expected
    assert code == exit_code


@pytest.mark.long
def test_the_way_in_runs_a_script_that_needs_no_framework(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('done')")
    code, said, wrong = without(MODULE, str(script))
    assert (code, said.strip()) == (0, "done"), wrong
    why = "it ran as one process, which has nothing to be compared with: start several"
    assert the_sentence(wrong) == f"ds_silent: nothing was observed: {why}"


def test_megatron_is_named_where_it_is_missing() -> None:
    code, _, wrong = without("import ds_silent; ds_silent.attach_megatron(None, None)")
    assert the_sentence(wrong) == (
        "ds_silent: ds_silent.attach_megatron needs megatron-core, which is not installed: "
        'pip install "ds_silent[megatron]"'
    )
    assert code == 1


def test_one_rank_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    code, _, wrong = without("import ds_silent; ds_silent.initialize(model=None)")
    assert (code, wrong) == (1, "")


def test_the_way_in_has_its_help() -> None:
    code, said, wrong = without(MODULE, "--help")
    assert code == 0, wrong
    assert said.startswith("usage: python -m ds_silent")


def test_the_fine_tune_has_its_help_and_names_its_extra() -> None:
    code, said, wrong = without(FINETUNE, "--help")
    assert code == 0, wrong
    assert "--max-steps" in said
    code, _, wrong = without(FINETUNE, "--max-steps", "2")
    assert code == 2
    assert the_sentence(wrong) == (
        "error: the fine-tune needs DeepSpeed, transformers, accelerate, datasets, tokenizers, which are not "
        'installed: pip install "ds_silent[finetune]"'
    )


def test_several_packages_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "print_without_traceback", lambda *kinds, tells: None)
    monkeypatch.setattr(extras, "installed", lambda package: package == "deepspeed")
    with pytest.raises(extras.MissingExtra) as raised:
        extras.needs("the fine-tune", "finetune")
    assert str(raised.value) == (
        "the fine-tune needs transformers, accelerate, datasets, tokenizers, which are not installed: "
        'pip install "ds_silent[finetune]"'
    )


def test_nobody_else_imports_deepspeed() -> None:
    found = []
    for path in sorted(PACKAGE.glob("**/*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if not place.startswith(DEEPSPEED):
            found += [f"{place}: {name}" for name in imported(path) if name.split(".")[0] == "deepspeed"]
    assert not found


def imported(path: Path) -> list[str]:
    """Every module that a file names in an import, at its top or inside a function."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
    return names
