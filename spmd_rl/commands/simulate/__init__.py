"""Ages, idle shares and throughput of a config on a virtual clock, by the real gate, dispatcher and sink."""

from spmd_rl.commands.simulate.command import main

__all__ = ["main"]
