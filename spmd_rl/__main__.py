"""`spmd_rl`, `python -m spmd_rl` and `torchrun -m spmd_rl`."""

import sys

from spmd_rl.cli import main
from spmd_rl.diagnostics.terminal import Plain


def run() -> int:
    """Run the command line with output that any terminal can show; returns the exit code."""
    sys.stdout, sys.stderr = Plain(sys.stdout), Plain(sys.stderr)
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
