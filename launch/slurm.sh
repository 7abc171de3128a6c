#!/usr/bin/env bash
# Several nodes under Slurm: one task a node, each of them launch/multi_node.sh; MASTER is the first.
#     sbatch --nodes=2 launch/slurm.sh configs/my.toml run.dir=/shared/run [section.key=value ...]
# Give the site's own options (partition, account, GPUs, cores) to sbatch; submit from the repository, or with
# the environment of an installed spmd_rl active.  A job that was queued again finds its checkpoints in run.dir.
#
# Preemption and the end of the job's time come as SIGTERM, 120 s ahead: the run stops with a complete checkpoint within
# run.shutdown_s, the job queues again and goes on from there.  So it does when a node fails: Slurm requeues it.
# A run that ended (done, refused, or failed on all its restarts) is not queued again, nor one that was stopped without a
# single checkpoint since it trained again, for the next start would get no further; scancel ends it for good.
#SBATCH --job-name=spmd_rl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
set -euo pipefail
[ -z "${SLURM_SUBMIT_DIR:-}" ] || cd "$SLURM_SUBMIT_DIR"
for word in "$@"; do [[ $word == run.dir=* ]] && run_dir=${word#run.dir=}; done
[[ ${1:-} == *.toml && -n ${run_dir:-} && -n ${SLURM_JOB_ID:-} ]] || {
    echo "usage: sbatch launch/slurm.sh CONFIG.toml run.dir=DIR [section.key=value ...]" >&2
    exit 2
}
launch=launch
if [ -e launch/multi_node.sh ]; then  # a checkout: its environment is made once, before all nodes look at it
    scripts/setup >/dev/null
else
    launch=$(spmd_rl launch)
fi
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export NNODES=$SLURM_JOB_NUM_NODES MASTER="$master:$((20000 + SLURM_JOB_ID % 10000))" RUN_ID=$SLURM_JOB_ID
trap 'exit 143' TERM  # scancel comes here too: then nothing is queued again
mkdir -p "$run_dir"
touch "$run_dir/.started"  # what the run said before this start does not count
code=0
srun --kill-on-bad-exit=0 "$launch/multi_node.sh" "$@" || code=$?
says() { [ "$run_dir/summary.json" -nt "$run_dir/.started" ] && grep -q "\"status\": \"$1\"" "$run_dir/summary.json"; }
wrote() { [ -n "$(find "$run_dir/$1" -name "$2" -newer "$run_dir/.started" -print -quit 2>/dev/null)" ]; }
if says stopped || { [ "$code" = 143 ] && ! says "done"; }; then
    if says stopped || wrote checkpoints COMPLETE || ! wrote batches 'step_*'; then
        echo "slurm.sh: stopped, queued again"
        exec scontrol requeue "$SLURM_JOB_ID"
    fi
    echo "slurm.sh: stopped with nothing saved since this start, not queued again: raise run.shutdown_s, or checkpoint more often" >&2
fi
exit "$code"
