#!/usr/bin/env bash
# Smoke test of one node with several GPUs: a few steps of the tiny model over NCCL, 1+1 ranks on 2 GPUs and 2+2 on 4.
# Prints why and ends with 0 where there are fewer than 2.
set -euo pipefail
config=configs/tiny_cpu.toml
. "$(dirname "$0")/ready.sh"
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$inside}
gpus=$("${bin}python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -lt 2 ]; then
    echo "smoke_gpus.sh: skipped, it needs 2 GPUs or more and torch sees $gpus"
    exit 0
fi
folders=$(mktemp -d)
trap 'rm -rf "$folders"' EXIT
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
for side in 1 2; do
    if [ "$gpus" -lt $((2 * side)) ]; then
        echo "smoke_gpus.sh: $side+$side skipped, it needs $((2 * side)) GPUs and torch sees $gpus"
        continue
    fi
    folder=$folders/$side
    mkdir "$folder"
    "${bin}torchrun" --standalone --nproc-per-node=$((2 * side)) -m spmd_rl "$config" \
        run.dir="$folder/run" run.steps=20 topology.inference=$side topology.trainer=$side | tee "$folder/log"
    grep -q "trainer mesh nccl, weights nccl" "$folder/log" || { echo "smoke_gpus.sh: NCCL was not used"; exit 1; }
    echo "smoke_gpus.sh: $side+$side passed"
done
