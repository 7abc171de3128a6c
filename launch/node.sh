#!/usr/bin/env bash
# One node with 8 GPUs: the split of the ranks is in the config's [topology], for instance 4 that infer and 4 that train.
#     launch/node.sh configs/my.toml [section.key=value ...]
set -euo pipefail
[[ ${1:-} == *.toml ]] || { echo "usage: launch/node.sh CONFIG.toml [section.key=value ...]" >&2; exit 2; }
config=$1; shift
. "$(dirname "$0")/ready.sh"
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$inside}
"${bin}python" -m spmd_rl check "$config" "$@" >/dev/null
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_PROPAGATE_ERROR=1
# The world restarts from its newest complete checkpoint up to three times after a failure.
exec "${bin}torchrun" --standalone --nproc-per-node="${NPROC:-8}" --max-restarts="${MAX_RESTARTS:-3}" \
    -m spmd_rl "$config" "$@"
