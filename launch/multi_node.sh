#!/usr/bin/env bash
# Several nodes: run this on each of them, with the same config and a run.dir that all of them see.
#     NNODES=2 MASTER=node0:29500 launch/multi_node.sh configs/my.toml run.dir=/shared/run [section.key=value ...]
#
# Ranks are numbered node by node: with [topology] inference = 8, trainer = 8 and 8 GPUs a node, the first node infers.
# RUN_ID    a name of the job that all nodes agree on; a new one for every start by hand
# IFACE     the network interface that gloo and NCCL use, if the default route is not the fast one
# Start the node of MASTER first, or at the same time.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ ${1:-} == *.toml && -n ${NNODES:-} && -n ${MASTER:-} ]] || {
    echo "usage: NNODES=N MASTER=host:port launch/multi_node.sh CONFIG.toml run.dir=DIR [section.key=value ...]" >&2
    exit 2
}
config=$1; shift
venv=$(scripts/setup)
"$venv/bin/python" -m spmd_rl check "$config" "$@" >/dev/null
if [ -n "${IFACE:-}" ]; then export GLOO_SOCKET_IFNAME=$IFACE NCCL_SOCKET_IFNAME=$IFACE; fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_PROPAGATE_ERROR=1
exec "$venv/bin/torchrun" --nnodes="$NNODES" --nproc-per-node="${NPROC:-8}" \
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER" --rdzv-id="${RUN_ID:-spmd_rl}" --max-restarts="${MAX_RESTARTS:-3}" \
    -m spmd_rl "$config" "$@"
