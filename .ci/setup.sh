#!/bin/sh
# Makes .venv and everything in it; `make` calls it, a second run does only what is missing.
#
#   .ci/setup.sh           create .venv, install, compile DeepSpeed's CPU communication operator
#   .ci/setup.sh unlock    remove the compile locks that killed runs have left behind
#
# Which package index is used is pip's own settings. Where torch has no GPU to drive, its CPU build is ten times
# smaller: set PIP_EXTRA_INDEX_URL to the CPU index that torch's installation page names.
# What goes wrong is one sentence; the whole story is in .venv/setup.log.
set -eu

cd "$(dirname "$0")/.."
venv=.venv
log=$venv/setup.log
extensions=$PWD/$venv/torch_extensions

fail() {
    echo "setup: $1" >&2
    exit 1
}

# torch's extension builder waits for ever on the lock of a build that was killed. A lock that is in use is open in
# the process that holds it.
unlock() {
    [ -d "$extensions" ] || return 0
    find "$extensions" -name lock -type f | while read -r lock; do
        if [ -d /proc/self/fd ]; then
            find /proc/[0-9]*/fd -lname "$lock" 2>/dev/null | grep -q . || rm -f "$lock"
        else
            find "$lock" -mmin +10 -exec rm -f {} +
        fi
    done
}

usable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.10 or newer; name another or unset PYTHON."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.12 python3.11 python3.10 python3.13 python3; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    found=$(python3 --version 2>/dev/null || echo "no python3 at all")
    fail "Python 3.10 or newer is needed and this machine has $found; install it, or set PYTHON to where it is."
}

install() {
    echo "setup: installing $1 ..."
    shift
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -c constraints.txt "$@" >>"$log" 2>&1 && return
    if grep -qiE 'name resolution|NewConnectionError|ConnectTimeout|Network is unreachable|Connection refused|ProxyError|Max retries|No route to host' "$log"; then
        fail "the package index cannot be reached; connect this machine or set PIP_INDEX_URL to one it can reach ($log has the details)."
    elif grep -qi 'No space left' "$log"; then
        fail "the disk is full; about 3 GB (8 GB with torch for GPUs) are needed here ($log has the details)."
    elif missing=$(grep -iE 'No matching distribution found for' "$log" | tail -n 1) && [ -n "$missing" ]; then
        fail "${missing#*ERROR: } for $("$venv/bin/python" --version); use Python 3.11 or another package index ($log has the details)."
    fi
    fail "pip could not install the packages: $(grep -i '^ *error' "$log" | head -n 1 | cut -c 1-200) ($log has the details)."
}

compile_operator() {
    echo "setup: compiling DeepSpeed's CPU communication operator ..."
    DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$extensions PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" - >>"$log" 2>&1 <<'PY' ||
from deepspeed.accelerator import get_accelerator

builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
if builder is not None and builder.is_compatible():
    builder.load(verbose=False)
PY
        fail "DeepSpeed's CPU communication operator does not compile; see the end of $log and check that ${CXX:-g++} works."
}

if [ "${1:-}" = unlock ]; then
    unlock
    exit 0
fi

compiler=${CXX:-g++}
command -v "$compiler" >/dev/null 2>&1 ||
    fail "no C++ compiler: DeepSpeed compiles a small operator with $compiler; install g++ (the package build-essential or gcc-c++)."

if ! usable "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || exit 1
    echo "setup: creating $venv with $("$python" --version) ..."
    "$python" -m venv --clear "$venv" >/dev/null 2>&1 ||
        fail "$python cannot create a virtual environment; install its venv package (python3-venv) or check the disk."
fi
: >"$log" || fail "$log cannot be written; check the permissions of this directory."

headers=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
[ -f "$headers/Python.h" ] ||
    fail "the C headers of Python are missing ($headers/Python.h); install the package python3-dev or python3-devel."

install "torch (some minutes on a slow line)" torch
install "ds_silent and what it needs" -e ".[dev]"
# Of what it brings along the tests need nothing that is not here already; without a wheel it would be compiled.
install "Megatron-core" --no-deps --only-binary megatron-core megatron-core
unlock
compile_operator
touch "$venv/.ready"
echo "setup: ready."
