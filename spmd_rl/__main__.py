"""`python -m spmd_rl` and `torchrun -m spmd_rl`."""

import sys

from spmd_rl.cli import main
from spmd_rl.diagnostics.terminal import Plain

if __name__ == "__main__":
    sys.stdout, sys.stderr = Plain(sys.stdout), Plain(sys.stderr)
    sys.exit(main(sys.argv[1:]))
