"""Virtual time for tests: nothing sleeps."""

from spmd_rl.commands.simulate.virtual_time import VirtualLoop, run_virtual

__all__ = ["VirtualLoop", "run_virtual"]
