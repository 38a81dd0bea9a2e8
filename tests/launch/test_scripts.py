"""The launch scripts: what --dry-run prints, and their own mistakes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
SCRIPTS = ("gpu.sh", "ascend.sh", "slurm.sbatch")


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # without the caller's own settings of the variables that the scripts only default
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("NCCL", "HCCL", "SLURM", "CUBLAS"))}
    return subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_is_content(script: str) -> None:
    found = subprocess.run([str(SHELLCHECK), str(LAUNCH / script)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    found = run(script, "--help")
    assert found.returncode == 0
    assert found.stdout.startswith("usage: ")


def test_one_gpu_node() -> None:
    found = run("gpu.sh", "--gpus", "4", "--dry-run", "--", "--model", "a b", "--max-steps", "5")
    assert found.returncode == 0, found.stderr
    assert "export NCCL_DEBUG=WARN" in found.stdout
    assert found.stdout.splitlines()[-1].endswith("deepspeed --num_gpus 4 launch/train.py --model a\\ b --max-steps 5 ")
    assert "NCCL_ALGO" not in found.stdout


def test_many_gpu_nodes_and_determinism() -> None:
    hosts = str(LAUNCH / "hostfile.example")
    found = run(
        "gpu.sh", "--hostfile", hosts, "--master-addr", "n1", "--interface", "eth0", "--deterministic", "--dry-run"
    )
    for line in ("NCCL_SOCKET_IFNAME=eth0", "NCCL_ALGO=Ring", "NCCL_NVLS_ENABLE=0", "CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        assert f"export {line}" in found.stdout
    assert f"--hostfile {hosts} --master_addr n1 launch/train.py" in found.stdout


def test_what_the_user_has_set_is_kept() -> None:
    assert "export NCCL_DEBUG=INFO" in run("gpu.sh", "--gpus", "1", "--dry-run", NCCL_DEBUG="INFO").stdout


def test_ascend() -> None:
    found = run("ascend.sh", "--npus", "8", "--deterministic", "--dry-run", CANN_SET_ENV="/opt/cann/set_env.sh")
    assert "source /opt/cann/set_env.sh" in found.stdout
    assert "export HCCL_DETERMINISTIC=true" in found.stdout
    assert "export HCCL_EXEC_TIMEOUT=1800" in found.stdout
    assert "--num_gpus 8 launch/train.py" in found.stdout
    missing = run("ascend.sh", CANN_SET_ENV="/nowhere/set_env.sh")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "/nowhere/set_env.sh is not there" in missing.stderr


def test_slurm_resumes_only_what_is_there(tmp_path: Path) -> None:
    fresh = run("slurm.sbatch", "--dry-run", "--output", str(tmp_path), "--max-steps", "3")
    assert fresh.returncode == 0, fresh.stderr
    assert "srun" in fresh.stdout
    assert "SLURM_PROCID" in fresh.stdout
    assert "--resume" not in fresh.stdout
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-2")
    again = run("slurm.sbatch", "--dry-run", f"--output={tmp_path}", "--max-steps", "3")
    assert again.stdout.count("--resume") == 1


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("gpu.sh", ["--gpu", "4"], "unknown option --gpu"),
        ("gpu.sh", ["--gpus", "0"], "--gpus must be a whole number of at least 1, got 0"),
        ("gpu.sh", ["--gpus"], "--gpus needs a value"),
        ("gpu.sh", ["--hostfile", "/nowhere"], "--hostfile /nowhere is not a readable file"),
        ("ascend.sh", ["--npus", "x"], "--npus must be a whole number of at least 1, got x"),
    ],
)
def test_a_mistake_gets_one_sentence(script: str, arguments: list[str], said: str) -> None:
    found = run(script, *arguments)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert said in found.stderr
