#!/bin/sh
# What a stranger gets: a wheel, installed into environments that have nothing else; `make test-package` calls it.
#
#   .ci/test_package.sh           build, install, run; the folder it works in is removed at the end
#
# 1. the wheel alone: --help, check and the readers work, the rest says in one sentence which extra it needs
# 2. with [deepspeed]: the drill finds a fault
# 3. with [finetune]: two steps of the fine-tune, whose script is not in the wheel
# 4. with [plots]: the picture of the cosines
#
# Which package index is used is pip's own settings, as in setup.sh; the versions are those of constraints.txt.
set -eu

cd "$(dirname "$0")/.."
root=$PWD
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
unset PYTHONPATH # pip takes a source tree that is named there for installed
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
work=$(mktemp -d "${TMPDIR:-/tmp}/ds_silent_package.XXXXXX")
log=$work/log
trap 'rm -rf "$work"' EXIT INT TERM

fail() {
    echo "test-package: $1" >&2
    tail -n 30 "$log" >&2
    exit 1
}

# Runs a command in the fresh environment, outside of the source tree: only what is installed is found.
run() {
    (cd "$work" && PATH="$work/venv/bin:$PATH" TORCH_EXTENSIONS_DIR="$work/extensions" "$@") >"$log" 2>&1
}

works() {
    run "$@" || fail "$* ended with status $?"
    echo "test-package:   $*"
}

# The last line of a command that must end with one sentence; $1 is what the sentence has to hold.
refuses() {
    wanted=$1
    shift
    if run "$@"; then fail "$* should have been refused"; fi
    if [ "$(wc -l <"$log")" != 1 ] || ! grep -qF "$wanted" "$log"; then fail "$* should have said in one line: $wanted"; fi
    echo "test-package:   $*: $(cat "$log")"
}

install() {
    "$work/venv/bin/python" -m pip install --disable-pip-version-check --no-input -q -c "$root/constraints.txt" "$@" \
        >"$log" 2>&1 || fail "pip could not install $*"
}

# Installed packages but pip itself, which venv brings.
count() {
    "$work/venv/bin/python" -m pip list --disable-pip-version-check --format=freeze 2>/dev/null | grep -vcE '^pip=='
}

echo "test-package: building the wheel ..."
"$python" -m venv "$work/builder" >"$log" 2>&1 || fail "$python cannot create a virtual environment"
"$work/builder/bin/python" -m pip install --disable-pip-version-check --no-input -q build >"$log" 2>&1 ||
    fail "pip could not install build"
"$work/builder/bin/python" -m build --outdir "$work/dist" "$root" >"$log" 2>&1 || fail "the wheel cannot be built"
wheel=$(echo "$work"/dist/*.whl)
"$python" -m venv "$work/venv" >"$log" 2>&1
"$work/venv/bin/python" -m pip uninstall -q -y setuptools >"$log" 2>&1 # Python 3.10 and 3.11 bring it, 3.12 does not
cp "$root/configs/ds_cpu_demo.json" "$work/ds_config.json"

echo "test-package: the wheel alone ..."
install "$wheel"
echo "test-package: $(count) packages"
works ds-silent --help
works ds-silent check ds_config.json
works python -c "from ds_silent.sinks.jsonl import read_events, read_metrics"
works python -m ds_silent --help
works ds-silent numerics --world-size 2 --steps 2 --rounds 0
works python "$root/launch/train.py" --help
refuses 'pip install "ds_silent[deepspeed]"' ds-silent drill --fault nan-loss
refuses 'pip install "ds_silent[alerts]"' ds-silent alert --test apprise:tgram://token/chat
refuses 'pip install "ds_silent[deepspeed]"' python -c "import ds_silent; ds_silent.initialize()"
refuses 'pip install "ds_silent[finetune]"' python "$root/launch/train.py" --max-steps 2

echo "test-package: with [deepspeed] ..."
install "${wheel}[deepspeed]"
echo "test-package: $(count) packages"
works ds-silent check ds_config.json
# what DeepSpeed compiles once per environment, before the drill starts to wait for its ranks
works python -c "
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder('ShareMemCommBuilder').load(verbose=False)"
works ds-silent drill --fault nan-loss
refuses 'pip install "ds_silent[finetune]"' python "$root/launch/train.py" --max-steps 2

echo "test-package: with [finetune] ..."
install "${wheel}[finetune]"
echo "test-package: $(count) packages"
works python "$root/launch/train.py" --max-steps 2 --output run --no-progress
[ "$(wc -l <"$work/run/metrics.jsonl")" = 2 ] || fail "two steps should have given two records"
grep -qF 'pip install "ds_silent[plots]"' "$log" || fail "the missing picture should have been noted"

echo "test-package: with [plots] ..."
install "${wheel}[plots]"
echo "test-package: $(count) packages"
works python -c "from ds_silent.sinks.matrix_image import matrix_image; assert matrix_image(((1.0,),), step=1) is not None"
echo "test-package: passed."
