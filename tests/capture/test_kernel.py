"""The kernel: its numbers in Triton's interpreter, its machine code compiled ahead of time, and when it is chosen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds_silent.kernels import launches
from ds_silent.kernels.accumulator import Accumulator, new_accumulator
from ds_silent.maths.mixing import PAIR, ROW
from ds_silent.maths.sketch import SHIFTS, make_plan, offsets_of

CPU = torch.device("cpu")


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("interpreted", [True, pytest.param(False, marks=on_a_gpu)])
@pytest.mark.long
def test_numbers(interpreted: bool) -> None:
    """In a process of its own, see there."""
    pytest.importorskip("triton")
    file = Path(__file__).with_name("kernel_numbers.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(file)]
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if interpreted else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 40


def variants() -> dict[str, tuple[str, dict[str, bool]]]:
    """What a training uses, and the most that can be asked for: dtype and switches."""
    some = {"MANY": False, "PREVIOUS": False, "CHECK": False, "SKETCH": True, "SQUARE": True}
    return {
        "bf16": ("bf16", some),
        "many of bf16": ("bf16", {**some, "MANY": True}),
        "bf16 and previous": ("bf16", {**some, "PREVIOUS": True}),
        "fp16 and previous": ("fp16", {**some, "PREVIOUS": True}),
        "fp32": ("fp32", some),
        "many of fp32": ("fp32", {**some, "MANY": True}),
        "fp32 and previous": ("fp32", {**some, "PREVIOUS": True}),
        "bf16, checksum too": ("bf16", {**some, "CHECK": True}),
        "checksums alone": ("i32", {**dict.fromkeys(some, False), "MANY": True, "CHECK": True}),
    }


@pytest.mark.parametrize("arch", [80, 90])
def test_machine_code(arch: int, tmp_path: Path) -> None:
    """No registers in memory, the gradient in loads of 16 bytes, nothing shared between threads inside the loop.

    Triton before 3.7 puts some 100 bytes of each thread's registers into memory.
    """
    pytest.importorskip("triton", minversion="3.7")
    for name, (dtype, switches) in variants().items():
        code, told = compiled(arch, dtype, switches, tmp_path)
        assert ".local" not in code, name
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in told, (name, told)
        assert int(re.search(r"Used (\d+) registers", told)[1]) <= 160, (name, told)
        loop = max(re.split(r"\n(?=\$L__BB)", code), key=lambda block: block.count("ld.global"))
        wide = len(re.findall(r"ld\.global(?:\.\w+)*\.(?:v4\.b32|v2\.b64)", loop))
        assert wide == 8 * (2 if switches["PREVIOUS"] else 1) // (2 if switches["CHECK"] and dtype == "bf16" else 1), (
            name
        )
        assert not re.search(r"ld\.global(?:\.\w+)*\.b(?:8|16)\b", loop), name
        assert "bar.sync" not in loop, name
        assert switches["CHECK"] or ".shared" not in loop, name


def compiled(arch: int, dtype: str, switches: dict[str, bool], folder: Path) -> tuple[str, str]:
    """PTX of the kernel for a device that need not be here, and what the assembler says of registers and memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from ds_silent.kernels import sketch_triton as kernel

    pointers = {
        **dict.fromkeys(("values", "previous"), f"*{dtype}"),
        **dict.fromkeys(("addresses", "segments", "words", "checks", "keys"), "*i64"),
        **dict.fromkeys(("programs", "order"), "*i32"),
        **dict.fromkeys(("tables", "squares"), "*fp32"),
    }
    constants = {
        **switches,
        "ALIGNED": True,
        "WIDTH": 131_048,
        "SHIFTS": SHIFTS,
        "WORDS_ROW": ROW,
        "PAIR": PAIR,
        "ROWS": kernel.ROWS,
        "OCTETS": kernel.OCTETS,
        "SPLITS": kernel.SPLITS,
        "STEP": kernel.STEP_ROWS[2 if "16" in dtype and not switches["CHECK"] else 4],
    }
    signature, names = {**pointers, "weight": "fp32", "length": "i32"}, kernel.read.arg_names
    source = ASTSource(
        kernel.read,
        {each: signature.get(each, "constexpr") for each in names},
        constants,
        {(names.index(each),): [["tt.divisibility", 16]] for each in (*pointers, "length")},
    )
    options = {"num_warps": kernel.WARPS, "maxnreg": kernel.REGISTERS}
    code = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
    (folder / "kernel.ptx").write_text(code)
    target = re.search(r"\.target (\w+)", code)[1]
    command = [get_ptxas(arch).path, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return code, done.stderr


def test_triton_is_not_imported_on_the_cpu() -> None:
    code = (
        "import sys, torch; from ds_silent.kernels import launches; from ds_silent.capture.local_gradient import *;"
        "print(launches.choice(torch.device('cpu')).by, 'triton' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if key != launches.VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() in (["compiled", "False"], ["torch", "False"])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    launches._choice.cache_clear()
    yield monkeypatch
    launches._choice.cache_clear()


def test_the_variable_decides(told: pytest.MonkeyPatch) -> None:
    told.setenv(launches.VARIABLE, "torch")
    assert launches.choice(CPU) == ("torch", "DS_SILENT_KERNEL=torch")
    offsets, total = offsets_of([100])
    assert type(new_accumulator(make_plan(total, 256), offsets, [100])) is Accumulator
    launches._choice.cache_clear()
    told.setenv(launches.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="DS_SILENT_KERNEL must be triton, compiled, torch or not set, got 'cuda'"):
        launches.choice(CPU)


def test_without_triton_its_wish_is_refused_and_a_gpu_gets_torch(told: pytest.MonkeyPatch) -> None:
    told.setattr(launches, "_why_not", lambda device: "No module named 'triton'")
    assert launches.choice(torch.device("cuda")) == ("torch", "No module named 'triton'")
    launches._choice.cache_clear()
    told.setenv(launches.VARIABLE, "triton")
    with pytest.raises(ValueError, match=r"does not run here \(No module named 'triton'\); unset it or say torch"):
        launches.choice(CPU)
