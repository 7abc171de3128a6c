"""The program, with a native engine that goes on with the keys and values of the weights before."""

import sys

from spmd_rl.cli import main
from spmd_rl.engine.native import NativeEngine
from spmd_rl.ranks import build_engine


class Faulty(NativeEngine):
    def _recompute_all(self, started: list) -> None:
        """Nothing."""


build_engine.NativeEngine = Faulty
sys.exit(main(sys.argv[1:]))
