"""A stand-in for ``sys.executable`` that is forked from a process which has imported torch already.

    subprocess.run([interpreter(), "-m", "torch.distributed.launcher.api", ..., "train.py"])

Launchers start their ranks by ``sys.executable``, which is the stand-in again, and spawned workers too. An interpreter
then costs 0.1 s of CPU instead of 2 to 5. The scripts find neither DeepSpeed nor ``ds_silent`` imported. With
``DS_SILENT_COLD`` in the environment ``interpreter()`` is ``sys.executable``; so it is under ``-m matrix``.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PRELOADED = (
    "torch",
    "torch.distributed.launcher.api",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._inductor.compile_fx",  # DeepSpeed's Muon imports it
    "torch.utils.tensorboard",
    "multiprocessing.spawn",
    "multiprocessing.resource_tracker",
    "networkx",
    "psutil",
    "pydantic",
    "torchmetrics",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "accelerate.commands.launch",
    "datasets",
)
HIGH = 500  # descriptors above it are nobody's
CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys
own = [int(name) for name in os.listdir("/proc/self/fd")]
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
own = [number for number in own if os.path.exists(f"/proc/self/fd/{{number}}") and number != server.fileno()]
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), own, sys.argv[0]]).encode()
descriptors = array.array("i", own)
server.sendmsg([len(request).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
server.sendall(request)
process = int(server.recv(32))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda given, _: os.kill(process, given))
for number in own:
    os.close(number)
status = int(server.recv(32) or b"9")
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""


@cache
def interpreter() -> str:
    """Return the executable; the first call starts the process that it is forked from."""
    if "DS_SILENT_COLD" in os.environ or not hasattr(os, "pidfd_open"):
        return sys.executable
    folder = tempfile.mkdtemp(prefix="ds_silent_python_")
    client, address = Path(folder, "python"), f"{folder}/server"
    client.write_text(CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)  # who comes before the server is ready waits
    command = [sys.executable, __file__, str(client), str(listening.fileno())]
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        command,
        cwd=folder,
        env={name: value for name, value in variables.items() if name != "PYTHONPATH"},
        stdin=subprocess.PIPE,  # ends with this process
        stdout=subprocess.DEVNULL,
        pass_fds=[listening.fileno()],
    )
    atexit.register(_end, server, folder)
    return str(client)


def _end(server: subprocess.Popen[bytes], folder: str) -> None:
    server.communicate()
    shutil.rmtree(folder, ignore_errors=True)


# -- the process that everything is forked from: it runs this file ----------------------------------------------------


def _serve(listening: socket.socket) -> Any:
    """Return in a forked child, with what it shall run; in the server never."""
    waiting: dict[int, tuple[int, int, socket.socket]] = {}  # by descriptor: process, its pidfd, the client
    poll = select.poll()
    for descriptor in (0, listening.fileno()):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == 0:
                os._exit(0)
            elif descriptor == listening.fileno():
                client, _ = listening.accept()
                request, given = _received(client)
                process = os.fork()
                if process == 0:
                    return request, given
                for number in given:
                    os.close(number)
                client.sendall(str(process).encode().ljust(32))
                handle = os.pidfd_open(process)
                waiting[handle] = waiting[client.fileno()] = process, handle, client
                poll.register(handle, select.POLLIN)
                poll.register(client.fileno(), select.POLLIN)
            elif descriptor in waiting:
                process, handle, client = waiting.pop(descriptor)
                waiting.pop(client.fileno() if descriptor == handle else handle)
                if descriptor != handle:  # whoever started it is gone
                    os.kill(process, signal.SIGKILL)
                poll.unregister(handle)
                poll.unregister(client.fileno())
                status = os.waitpid(process, 0)[1]
                os.close(handle)
                if descriptor == handle:
                    client.sendall(str(status).encode())
                client.close()


def _received(client: socket.socket) -> tuple[Any, list[int]]:
    descriptors = array.array("i")
    size, ancillary, _, _ = client.recvmsg(8, socket.CMSG_SPACE(4 * 200))
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % 4])
    left, text = int.from_bytes(size, "big"), b""
    while len(text) < left:
        text += client.recv(left - len(text))
    return json.loads(text), list(descriptors)


def _become(request: Any, given: list[int], base: list[str]) -> list[str]:
    """Take over the client's descriptors, environment and directory; return the arguments that Python would read."""
    arguments, variables, directory, numbers, executable = request
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, HIGH) for number in given]
    os.closerange(3, HIGH)
    for source, number in zip(moved, numbers, strict=True):
        os.dup2(source, number)
        os.close(source)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    import multiprocessing.spawn

    sys.executable = executable
    multiprocessing.spawn.set_executable(executable)
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*map(os.path.abspath, paths), *base]
    importlib.invalidate_caches()
    if importlib.util.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")
    while arguments and arguments[0] in ("-u", "-s", "-E", "-B"):
        if arguments.pop(0) == "-u":
            variables["PYTHONUNBUFFERED"] = "1"
    if variables.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    return list(arguments)


def _run(arguments: list[str]) -> None:
    """As ``python arguments``: a module, a command or a file."""
    main = ModuleType("__main__")
    vars(main).update({"__builtins__": __builtins__, "__spec__": None})
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), vars(main))
    else:
        path = os.path.abspath(arguments[0])
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        main.__file__ = path
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    sys.path.pop(0)
    for _name in PRELOADED:
        if importlib.util.find_spec(_name.partition(".")[0]) is not None:
            importlib.import_module(_name)
    import gc

    gc.collect()
    gc.freeze()
    _run(_become(*_serve(socket.socket(fileno=int(sys.argv[2]))), [*sys.path]))
