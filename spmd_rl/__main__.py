"""`spmd_rl`, `python -m spmd_rl` and `torchrun -m spmd_rl`."""

import os
import signal
import sys

from spmd_rl.cli import main
from spmd_rl.diagnostics.terminal import Plain


def run() -> int:
    """Run the command line with output that any terminal can show; returns the exit code."""
    sys.stdout, sys.stderr = Plain(sys.stdout), Plain(sys.stderr)
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who read the output has gone, as `head` goes; what is left of it goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(run())
