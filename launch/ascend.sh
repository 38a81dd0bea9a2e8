#!/usr/bin/env bash
# The fine-tune on Ascend NPUs: one node, or many over ssh.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/ascend.sh [options] [-- arguments of launch/train.py]

  --npus N             NPUs per node (default: 8; a hostfile's slots on many nodes)
  --hostfile FILE      many nodes over ssh (needs pdsh), one line per node: "name slots=8"
  --master-addr HOST   address of the first node, where `hostname -I` would give the wrong one
  --interface NAME     network interface for HCCL's and gloo's sockets (HCCL_SOCKET_IFNAME)
  --deterministic      the same bits in every run on the same number of ranks, at some cost
  --dry-run            print what would run, and run nothing
  -h, --help           this text

  launch/ascend.sh --npus 8 -- --deepspeed configs/ds_paper_8npu.json --model /models/openPangu-Embedded-1B \
      --data tatsu-lab/alpaca --template alpaca-with-input --no-append-eos --no-drop-last
  launch/ascend.sh --hostfile launch/hostfile.example --interface eth0 --dry-run

Environment: CANN_SET_ENV names CANN's set_env.sh (default /usr/local/Ascend/ascend-toolkit/set_env.sh). What starts with
ASCEND, HCCL, PYTHON, PATH or LD_LIBRARY is handed on to other nodes by DeepSpeed; everything else that they need
goes into ~/.deepspeed_env of this node, as NAME=value lines. Values that are already set are kept.
torch_npu must be of torch's own version. On SIGTERM the ranks save a checkpoint; DeepSpeed's launcher gives them
30 seconds for it.
TEXT
}

fail() {
  echo "launch/ascend.sh: $1" >&2
  exit 2
}

npus="" hostfile="" master="" interface="" deterministic=false dry_run=false
while (($#)); do
  case "$1" in
    --npus | --hostfile | --master-addr | --interface)
      (($# >= 2)) || fail "$1 needs a value"
      case "$1" in
        --npus) npus="$2" ;;
        --hostfile) hostfile="$2" ;;
        --master-addr) master="$2" ;;
        --interface) interface="$2" ;;
      esac
      shift 2
      ;;
    --deterministic) deterministic=true && shift ;;
    --dry-run) dry_run=true && shift ;;
    -h | --help) usage && exit 0 ;;
    --) shift && break ;;
    *) fail "unknown option $1 (arguments of launch/train.py go behind --); see --help" ;;
  esac
done

[[ -z "$npus" || "$npus" =~ ^[1-9][0-9]*$ ]] || fail "--npus must be a whole number of at least 1, got $npus"
[[ -z "$hostfile" || -r "$hostfile" ]] || fail "--hostfile $hostfile is not a readable file"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

exported=()
# Sets a variable unless the user has, and notes it for --dry-run.
default() {
  local name="$1" value="$2"
  export "$name=${!name:-$value}"
  exported+=("$name=${!name}")
}

# the first step may compile operators for minutes on some ranks while the others wait in a collective
default HCCL_CONNECT_TIMEOUT 1800
default HCCL_EXEC_TIMEOUT 1800
default HCCL_WHITELIST_DISABLE 1
default ASCEND_GLOBAL_LOG_LEVEL 3
default OMP_NUM_THREADS 8
if [[ -n "$interface" ]]; then
  default HCCL_SOCKET_IFNAME "$interface"
  default GLOO_SOCKET_IFNAME "$interface"
fi
if $deterministic; then
  default HCCL_DETERMINISTIC true
fi

set_env="${CANN_SET_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}"
deepspeed="$root/.venv/bin/deepspeed"
[[ -x "$deepspeed" ]] || deepspeed="deepspeed"
command=("$deepspeed")
if [[ -n "$hostfile" ]]; then
  command+=(--hostfile "$(realpath "$hostfile")")
  [[ -z "$npus" ]] || command+=(--num_gpus "$npus")
  [[ -z "$master" ]] || command+=(--master_addr "$master")
else
  command+=(--num_gpus "${npus:-8}")
fi
command+=(launch/train.py "$@")

if $dry_run; then
  printf 'cd %q\n' "$root"
  printf 'source %q\n' "$set_env"
  printf 'export %q\n' "${exported[@]}"
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
[[ -r "$set_env" ]] || fail "$set_env is not there: install CANN, or name its set_env.sh in CANN_SET_ENV"
set +u # CANN's own script reads variables that may not be set
# shellcheck disable=SC1090
source "$set_env"
set -u
command -v "$deepspeed" >/dev/null || fail "deepspeed is not installed: pip install deepspeed"
cd "$root"
exec "${command[@]}"
