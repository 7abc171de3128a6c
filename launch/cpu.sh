#!/usr/bin/env bash
# The asynchronous loop on a laptop: two processes, one core each. A first argument that ends in .toml is the config;
# all others are passed on, such as run.steps=5 or --resume.  In a checkout, relative paths in there are below it.
# NPROC is the number of processes, 2 unless [topology] says otherwise.
set -euo pipefail
config=configs/smollm2_cpu.toml
if [[ ${1:-} == *.toml ]]; then config=$1; shift; fi
. "$(dirname "$0")/ready.sh"
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$inside}
"${bin}python" -m spmd_rl check "$config" "$@" >/dev/null
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
exec "${bin}torchrun" --standalone --nproc-per-node="${NPROC:-2}" -m spmd_rl "$config" "$@"
