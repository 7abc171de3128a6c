"""What an environment judges replies with: rules for text, numbers and mathematics, tests of code, a language model."""

from spmd_rl.processes.sandbox import Execution, Program, Sandbox
from spmd_rl.processes.workers import TimedOut, WorkerDied, Workers
from spmd_rl.rewards.llm_judge import Judge, JudgeFailed, grade
from spmd_rl.rewards.math_expression import math_equals
from spmd_rl.rewards.program_tests import code_of, outputs_equal, statements_passed
from spmd_rl.rewards.text import (
    after,
    between,
    contains_word,
    exact,
    fill,
    last_number_equals,
    matches,
    number_of,
    numbers,
    share_of,
    thought_out,
    weighted_sum,
)

__all__ = [
    "Execution",
    "Judge",
    "JudgeFailed",
    "Program",
    "Sandbox",
    "TimedOut",
    "WorkerDied",
    "Workers",
    "after",
    "between",
    "code_of",
    "contains_word",
    "exact",
    "fill",
    "grade",
    "last_number_equals",
    "matches",
    "math_equals",
    "number_of",
    "numbers",
    "outputs_equal",
    "share_of",
    "statements_passed",
    "thought_out",
    "weighted_sum",
]
