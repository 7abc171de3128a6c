#!/usr/bin/env bash
# Several nodes: run this on each of them, with the same config and a run.dir that all of them see.
#     NNODES=2 MASTER=node0:29500 launch/multi_node.sh configs/my.toml run.dir=/shared/run [section.key=value ...]
#
# MASTER        host:port of the node where all meet; nodes may start in any order, within READ_S of it
# RUN_ID        a name of the job that all nodes agree on
# IFACE         the network interface of rendezvous, gloo and NCCL; without it the one on the way to MASTER
# NPROC         ranks per node, 8
# MAX_RESTARTS  failures after which this node tries again, 3; the run goes on from its newest complete checkpoint.
#               A run that was refused (code 2) or stopped (143, 130), here or on another node, is not started again
# PAUSE_S       before it does, so that the other nodes have ended as well, 20 s
# JOIN_S        how long nodes wait for one that is missing, at the start and after a failure, 600 s
# READ_S        how long a node tries to reach MASTER, 60 s
#
# Ranks are numbered node by node in the order of the nodes' addresses as text: with [topology] inference = 8,
# trainer = 8 and 8 GPUs a node, the first of them infers.
#
# After a failure every torchrun ends and a new one starts, on all nodes: torchrun's own restarts (--max-restarts) never
# get a node back that was lost, since the nodes that stayed do not tell it where their store is.  On a lost node (MASTER
# too) run this again; the others wait for it.  A cut link loses packets without a word: the ranks on both sides end after
# 20 s with an error that says so, and with them a torchrun that no longer hears from MASTER.
# SIGTERM, SIGINT and SIGHUP (a closed terminal; not under nohup) stop the run on all nodes, and end this script with 143:
# with a complete checkpoint if summary.json says "stopped"; if it says "failed" run.shutdown_s was not enough, or
# something failed meanwhile, and the newest checkpoint is an older one.
set -euo pipefail
[[ ${1:-} == *.toml && -n ${NNODES:-} && ${MASTER:-} == *:* ]] || {
    echo "usage: NNODES=N MASTER=host:port launch/multi_node.sh CONFIG.toml run.dir=DIR [section.key=value ...]" >&2
    exit 2
}
config=$1; shift
. "$(dirname "$0")/ready.sh"
checked=$("${bin}python" -m spmd_rl check "$config" "$@")
if [[ $checked == *$'\ndir = ""\n'* ]]; then  # a start after a failure would not find what the one before left
    echo "error: run.dir is not set: give a folder that all nodes see" >&2
    exit 2
fi
# A node's own name may resolve to nothing, or to a loopback address that no other node reaches: gloo, NCCL and torchrun
# (--local-addr, is_host) are told which address and interface to use, and look nothing up.
reached=$("${bin}python" "$launch/interface.py" "${MASTER%:*}" ${IFACE:+"$IFACE"})
read -r address iface is_host <<<"$reached"
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$iface} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$iface}  # "=": exactly
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# a hung NCCL collective leaves what every rank was at, and an error on one rank reaches the others
export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_PROPAGATE_ERROR=1

# what its ranks say of each start: "started 1", "ended <code>"
SPMD_RL_NOTES=$(mktemp); export SPMD_RL_NOTES
trap 'rm -f "$SPMD_RL_NOTES"' EXIT
stopping= child= restarts=0
stop() { stopping=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true; }
trap stop TERM INT HUP  # TERM for all: a background child of a script ignores INT
for ((failures = 1; ; failures++)); do
    : >"$SPMD_RL_NOTES"
    # a session of its own: a signal to this script's process group must not reach torchrun twice
    SPMD_RL_RESTARTS=$restarts setsid "${bin}torchrun" --nnodes="$NNODES" --nproc-per-node="${NPROC:-8}" \
        --rdzv-backend=c10d --rdzv-endpoint="$MASTER" --rdzv-id="${RUN_ID:-spmd_rl}" --local-addr="$address" \
        --rdzv-conf="is_host=$is_host,join_timeout=${JOIN_S:-600},read_timeout=${READ_S:-60}" \
        -m spmd_rl "$config" "$@" &
    child=$!
    [ -z "$stopping" ] || stop  # it came before there was a child
    until wait "$child"; code=$?; ! kill -0 "$child" 2>/dev/null; do :; done  # a signal ends a wait, not the child
    if [ "$code" = 0 ]; then exit 0; fi
    ended=$(sed -n 's/^ended //p' "$SPMD_RL_NOTES" | tail -n 1)
    if [ -n "$ended" ]; then exit "$ended"; fi
    if [ -n "$stopping" ]; then exit 143; fi
    if [ "$failures" -gt "${MAX_RESTARTS:-3}" ]; then exit "$code"; fi
    if grep -q '^started' "$SPMD_RL_NOTES"; then restarts=$((restarts + 1)); fi
    echo "multi_node.sh: torchrun ended with $code, starting again in ${PAUSE_S:-20} s (restart $failures)" >&2
    sleep "${PAUSE_S:-20}" &
    child=$!
    [ -z "$stopping" ] || stop
    wait "$child" || exit 143
done
