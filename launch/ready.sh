# Sourced by every launch script, with a config in $config: finds the config and the environment of spmd_rl.
#     $here    the folder of the user
#     $config  from $here, or of those that are shipped
#     $bin     the folder of python and torchrun with a / at its end; empty where PATH has them
#     $inside  the interface that no other machine reaches, for gloo where all ranks are on this one
# In a checkout it makes the environment and goes to the repository, below which all relative paths are then.
here=$PWD
launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ ! -f "$here/$config" ] || config=$here/$config
if [ -x "$launch/../scripts/setup" ]; then
    cd "$launch/.."
    bin=$(scripts/setup)/bin/
else
    bin=
    [ -f "$config" ] || config=$launch/../$config
    python -c 'import spmd_rl' 2>/dev/null || { echo "$0: activate the environment that has spmd_rl" >&2; exit 2; }
fi
inside=lo
[ "$(uname)" != Darwin ] || inside=lo0
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}  # the limit is run.shutdown_s
