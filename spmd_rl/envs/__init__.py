"""What a user's environment is made from: the protocol, the plain data, and episodes of one turn or of many."""

from spmd_rl.envs.chat import Chat, Rewritten, with_tool
from spmd_rl.envs.dataset import Dataset
from spmd_rl.envs.environment import Data, Environment, Generate, drawn, judged, load, of_split, take_turn
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import Completion, NotRetried, Resumable, Rollout, Task

__all__ = [
    "Chat",
    "Completion",
    "Data",
    "Dataset",
    "Environment",
    "Generate",
    "NotRetried",
    "Resumable",
    "Rewritten",
    "Rollout",
    "SingleTurn",
    "Task",
    "Tokenizer",
    "drawn",
    "judged",
    "load",
    "of_split",
    "take_turn",
    "with_tool",
]
