"""What surrounds one rank: code, versions, environment variables that change numbers, the device's model.

Read from files and from this process alone: no process is started that could hang.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from ds_silent.device import kind, model_name
from ds_silent.extras import version_of
from ds_silent.kernels.launches import choice
from ds_silent.maths.fingerprint import hash_bytes, shown_hash
from ds_silent.preflight.items import Item, item_of

BELOW = ("ds_silent", "torch", "torch_npu")
ABOVE = ("transformers", "accelerate", "datasets", "numpy")
"""Packages whose versions are compared, below the framework and above it."""
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "PYTORCH_JIT",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ASCEND_LAUNCH_BLOCKING",
)
# What these say of a host (interfaces, addresses, files, logs) differs for good reasons and changes no number.
_HOST = re.compile(r"IFNAME|_IP$|_IB_|PORT|FILE|DEBUG|LOG|TOPO|HOSTID|COMM_ID|WHITELIST|TIMEOUT|SOCKET|NET|CUMEM")


def code_items(packages: Sequence[str] = ()) -> list[Item]:
    """Versions of what computes, the framework's ``packages`` among them, the script, and the revision of the working
    directory."""
    names = (*BELOW, *packages, *ABOVE)
    values: dict[str, str | Callable[[], str]] = {
        **{f"{name} version": partial(_version_of, name) for name in names},
        "Python version": platform.python_version(),
        "accelerator runtime": f"CUDA {torch.version.cuda}, HIP {getattr(torch.version, 'hip', None)}",
        "script": _script,
        "git revision": lambda: git_revision(Path.cwd()),
    }
    return [item_of(name, "code", value, severity="warning") for name, value in values.items()]


def environment_items(environment: Mapping[str, str]) -> list[Item]:
    """Variables and switches that change numbers, and the device's model (another model is news, not a fault)."""

    def beginning(prefix: str) -> str:
        found = {key: value for key, value in environment.items() if key.startswith(prefix) and not _HOST.search(key)}
        return " ".join(f"{key}={value}" for key, value in sorted(found.items())) or "none set"

    def switches() -> str:
        return (
            f"matmul precision {torch.get_float32_matmul_precision()}, "
            f"cuDNN TF32 {torch.backends.cudnn.allow_tf32} deterministic {torch.backends.cudnn.deterministic} "
            f"benchmark {torch.backends.cudnn.benchmark}, "
            f"deterministic algorithms {torch.are_deterministic_algorithms_enabled()}, "
            f"default dtype {torch.get_default_dtype()}"
        )

    return [
        *(item_of(name, "environment", environment.get(name, "not set"), severity="warning") for name in VARIABLES),
        *(item_of(f"{p}* variables", "environment", beginning(p), severity="warning") for p in ("NCCL_", "HCCL_")),
        item_of("numeric switches of torch", "environment", switches, severity="warning"),
        item_of("device model", "environment", _device_model, severity="info"),
        item_of("gradients read by", "environment", _read_by, severity="info"),
    ]


def git_revision(folder: Path) -> str:
    """The commit that ``folder`` has checked out, read from files: no process that could hang; "none" outside git."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if git.is_file():  # a linked working tree
            git = (parent / git.read_text().removeprefix("gitdir:").strip()).resolve()
        if (git / "HEAD").is_file():
            return _resolved(git, (git / "HEAD").read_text().strip())
    return "none"


def _resolved(git: Path, head: str) -> str:
    if not head.startswith("ref:"):
        return head[:64]
    name = head.removeprefix("ref:").strip()
    common = git / "commondir"
    for place in (git, (git / common.read_text().strip()).resolve() if common.is_file() else git):
        if (place / name).is_file():
            return (place / name).read_text().strip()[:64]
        packed = place / "packed-refs"
        for line in packed.read_text().splitlines() if packed.is_file() else ():
            if line.endswith(f" {name}"):
                return line.split()[0][:64]
    return f"unborn {name}"


def _script() -> str:
    path = Path(sys.argv[0] if sys.argv and sys.argv[0] else "-")
    return f"{path.name} {shown_hash(hash_bytes(path.read_bytes()))}" if path.is_file() else "interactive"


def _version_of(name: str) -> str:
    return version_of(name) or "not installed"


def _device_model() -> str:
    information = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.*)$", information.read_text(), re.M) if information.is_file() else []
    return model_name() or (models[0] if models else platform.machine())


def _read_by() -> str:
    """Ranks may differ: the numbers are the same but for their rounding."""
    chosen = choice(torch.device(kind()))
    return f"torch ({chosen.reason})" if chosen.by == "torch" else chosen.reason
