# Sourced in the repository, with the user's folder in $here and the config as it was given in $config: finds the config
# from there, makes the environment ($venv), and sets what every launch on one or many nodes wants.
[ ! -f "$here/$config" ] || config=$here/$config
venv=$(scripts/setup)
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}  # the limit is run.shutdown_s
