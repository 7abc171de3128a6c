#!/usr/bin/env bash
# Both sides on one GPU: two processes share the device. NCCL refuses two ranks on one device, so weights go over gloo
# through pinned host memory; everything else is as on many. First argument: the config, a Hugging Face model in its [model].
set -euo pipefail
config=configs/smollm2_cpu.toml
if [[ ${1:-} == *.toml ]]; then config=$1; shift; fi
. "$(dirname "$0")/ready.sh"
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$inside}
"${bin}python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "one_gpu.sh: torch sees no GPU; launch/cpu.sh runs the same loop without one")'
"${bin}python" -m spmd_rl check "$config" "$@" >/dev/null
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec "${bin}torchrun" --standalone --nproc-per-node=2 -m spmd_rl "$config" "$@"
