"""The program, with a vLLM engine that breaks in its third step."""

import sys

from spmd_rl.cli import main
from spmd_rl.engine import vllm
from spmd_rl.types import Completion


class Breaks(vllm.VllmEngine):
    num_steps = 0

    def step(self) -> list[tuple[int, Completion]]:
        self.num_steps += 1
        if self.num_steps == 3 and self._group.rank() == 0:
            raise RuntimeError("the device is on fire")
        return super().step()


vllm.VllmEngine = Breaks
sys.exit(main(sys.argv[1:]))
