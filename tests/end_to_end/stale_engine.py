"""The program, with a native engine that says that it took version 2 and goes on computing with version 1."""

import sys
from collections.abc import Mapping

from torch import Tensor

from spmd_rl.cli import main
from spmd_rl.engine.native import NativeEngine
from spmd_rl.ranks import build_engine


class Stale(NativeEngine):
    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        load = self._body.load
        if version == 2:
            self._body.load = lambda weights: None
        super().load_weights(tensors, version)
        self._body.load = load


build_engine.NativeEngine = Stale
sys.exit(main(sys.argv[1:]))
