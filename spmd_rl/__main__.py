"""`python -m spmd_rl` and `torchrun -m spmd_rl`."""

import sys

from spmd_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
