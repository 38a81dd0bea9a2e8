"""The kernel: its numbers in Triton's interpreter, its machine code compiled ahead of time, and when it is chosen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_silent.capture import fused
from ds_silent.capture.accumulator import Accumulator
from ds_silent.maths.sketch import make_plan, offsets_of

CPU = torch.device("cpu")


def test_numbers_in_the_interpreter() -> None:
    """In a process of its own, see there."""
    pytest.importorskip("triton")
    file = Path(__file__).with_name("interpreted_kernel.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 40


def variants() -> dict[str, dict[str, object]]:
    switches = dict.fromkeys(("MANY", "PREVIOUS", "FACTS", "CHECK"), False) | dict.fromkeys(("SKETCH", "SQUARE"), True)
    found: dict[str, dict[str, object]] = {}
    for dtype in ("bf16", "fp16", "fp32"):
        found[dtype] = {"values": dtype, **switches}
        found[f"{dtype}, many"] = {"values": dtype, **switches, "MANY": True}
        found[f"{dtype}, previous"] = {"values": dtype, **switches, "PREVIOUS": True}
    found["fp32, everything"] = {"values": "fp32", **switches, "PREVIOUS": True, "FACTS": True}
    found["bf16, checksum too"] = {"values": "bf16", **switches, "FACTS": True, "CHECK": True}
    found["checksum"] = {"values": "i32", **dict.fromkeys(switches, False), "MANY": True, "CHECK": True}
    return found


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", variants())
def test_machine_code(arch: int, name: str, tmp_path: Path) -> None:
    """No registers in memory, the gradient in loads of 16 bytes, registers for eight warps on each scheduler."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ds_silent.maths import sketch_triton as kernel
    from ds_silent.maths.sketch import SHIFTS
    from ds_silent.replicas.checksums import ROW

    chosen = variants()[name]
    dtype = chosen.pop("values")
    pointers = {
        **dict.fromkeys(("values", "previous"), f"*{dtype}"),
        **dict.fromkeys(("addresses", "segments", "words", "checks", "keys"), "*i64"),
        **dict.fromkeys(("programs", "order", "non_finite"), "*i32"),
        **dict.fromkeys(("tables", "squares", "largest"), "*fp32"),
    }
    constants = {
        **chosen,
        "ALIGNED": True,
        "WIDTH": 131_048,
        "SHIFTS": SHIFTS,
        "WORDS_ROW": ROW,
        "ROWS": kernel.ROWS,
        "OCTETS": kernel.OCTETS,
        "SPLITS": kernel.SPLITS,
    }
    signature = {**pointers, "weight": "fp32", "length": "i32"}
    names = kernel.read.arg_names
    source = ASTSource(
        kernel.read,
        {each: signature.get(each, "constexpr") for each in names},
        constants,
        {(names.index(each),): [["tt.divisibility", 16]] for each in (*pointers, "length")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": kernel.WARPS})
    code = compiled.asm["ptx"]
    assert ".local" not in code
    wide = len(re.findall(r"ld\.global(?:\.\w+)*\.(?:v4\.b32|v2\.b64)", code))
    print(name, arch, "wide loads", wide, "others", sorted(set(re.findall(r"ld\.global(?:\.\w+)*", code))))
    told = ptxas(code, arch, tmp_path)
    print(told)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in told
    assert int(re.search(r"Used (\d+) registers", told)[1]) <= 168
    rows = kernel.ROWS * (1 if "16" in str(dtype) else 2) * (2 if chosen["PREVIOUS"] else 1)
    assert wide >= rows


def ptxas(code: str, arch: int, folder: Path) -> str:
    """What the assembler says of registers and memory."""
    from triton import knobs

    (folder / "kernel.ptx").write_text(code)
    target = re.search(r"\.target (\w+)", code)[1]
    command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_torch_is_chosen_on_the_cpu_and_triton_is_not_imported() -> None:
    code = (
        "import sys, torch; from ds_silent.capture import fused; from ds_silent.capture.local_gradient import *;"
        "print(fused.choice(torch.device('cpu')).triton, 'triton' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if key != fused.VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    fused.choice.cache_clear()
    yield monkeypatch
    fused.choice.cache_clear()


def test_the_variable_decides(told: pytest.MonkeyPatch) -> None:
    told.setenv(fused.VARIABLE, "torch")
    assert fused.choice(CPU) == (False, "DS_SILENT_KERNEL=torch")
    offsets, total = offsets_of([100])
    assert type(fused.new_accumulator(make_plan(total, 256), offsets, [100])) is Accumulator
    fused.choice.cache_clear()
    told.setenv(fused.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="DS_SILENT_KERNEL must be triton, torch or not set, got 'cuda'"):
        fused.choice(CPU)


def test_without_triton_its_wish_is_refused_and_a_gpu_gets_torch(told: pytest.MonkeyPatch) -> None:
    told.setattr(fused, "_why_not", lambda device: "No module named 'triton'")
    assert fused.choice(torch.device("cuda")) == (False, "No module named 'triton'")
    fused.choice.cache_clear()
    told.setenv(fused.VARIABLE, "triton")
    with pytest.raises(ValueError, match=r"does not run here \(No module named 'triton'\); unset it or say torch"):
        fused.choice(CPU)
