#!/usr/bin/env bash
# The fine-tune on NVIDIA GPUs: one node, or many over ssh.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/gpu.sh [options] [-- arguments of launch/train.py]

  --gpus N             GPUs per node (default: all that nvidia-smi lists; a hostfile's slots on many nodes)
  --hostfile FILE      many nodes over ssh (needs pdsh), one line per node: "name slots=8"
  --master-addr HOST   address of the first node, where `hostname -I` would give the wrong one
  --interface NAME     network interface for NCCL's and gloo's sockets (NCCL_SOCKET_IFNAME)
  --deterministic      the same bits in every run on the same number of ranks, at some cost
  --dry-run            print what would run, and run nothing
  -h, --help           this text

  launch/gpu.sh --gpus 8 -- --model /models/openPangu-Embedded-1B --data tatsu-lab/alpaca
  launch/gpu.sh --hostfile launch/hostfile.example --interface eth0 --dry-run

Environment: what starts with NCCL_ or PYTHON is handed on to other nodes by DeepSpeed; everything else that they
need goes into ~/.deepspeed_env of this node, as NAME=value lines. Values that are already set are kept.
On SIGTERM the ranks save a checkpoint; DeepSpeed's launcher gives them 30 seconds for it.
TEXT
}

fail() {
  echo "launch/gpu.sh: $1" >&2
  exit 2
}

gpus="" hostfile="" master="" interface="" deterministic=false dry_run=false
while (($#)); do
  case "$1" in
    --gpus | --hostfile | --master-addr | --interface)
      (($# >= 2)) || fail "$1 needs a value"
      case "$1" in
        --gpus) gpus="$2" ;;
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

[[ -z "$gpus" || "$gpus" =~ ^[1-9][0-9]*$ ]] || fail "--gpus must be a whole number of at least 1, got $gpus"
[[ -z "$hostfile" || -r "$hostfile" ]] || fail "--hostfile $hostfile is not a readable file"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

exported=()
# Sets a variable unless the user has, and notes it for --dry-run.
default() {
  local name="$1" value="$2"
  export "$name=${!name:-$value}"
  exported+=("$name=${!name}")
}

default NCCL_DEBUG WARN
default OMP_NUM_THREADS 8
default PYTORCH_CUDA_ALLOC_CONF expandable_segments:True
if [[ -n "$interface" ]]; then
  default NCCL_SOCKET_IFNAME "$interface"
  default GLOO_SOCKET_IFNAME "$interface"
fi
if $deterministic; then
  # a fixed order of additions in every all-reduce, and cuBLAS without its changing work spaces
  default NCCL_ALGO Ring
  default NCCL_NVLS_ENABLE 0
  default CUBLAS_WORKSPACE_CONFIG :4096:8
  if [[ -n "$hostfile" ]] && ! $dry_run && ! grep -qs '^CUBLAS_WORKSPACE_CONFIG=' ~/.deepspeed_env "$root/.deepspeed_env"; then
    fail "--deterministic on many nodes needs the line CUBLAS_WORKSPACE_CONFIG=:4096:8 in ~/.deepspeed_env"
  fi
fi

deepspeed="$root/.venv/bin/deepspeed"
[[ -x "$deepspeed" ]] || deepspeed="deepspeed"
command=("$deepspeed")
if [[ -n "$hostfile" ]]; then
  command+=(--hostfile "$(realpath "$hostfile")")
  [[ -z "$gpus" ]] || command+=(--num_gpus "$gpus")
  [[ -z "$master" ]] || command+=(--master_addr "$master")
else
  if [[ -z "$gpus" ]]; then
    gpus="$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true)"
    if [[ "$gpus" == 0 ]]; then
      $dry_run || fail "nvidia-smi lists no GPU here; on a CPU run: make demo"
      gpus=8 # something to show
    fi
  fi
  command+=(--num_gpus "$gpus")
fi
command+=(launch/train.py "$@")

if $dry_run; then
  printf 'cd %q\n' "$root"
  printf 'export %q\n' "${exported[@]}"
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
command -v "$deepspeed" >/dev/null || fail "deepspeed is not installed: pip install deepspeed, or make test"
cd "$root"
exec "${command[@]}"
