"""Programming tasks from a file, judged by running the reply's code against the row's tests in a sandbox.

Rows have a question and a list of tests: statements such as "assert add(2, 3) == 5", or [input, output] pairs.
"""

from __future__ import annotations

from spmd_rl.code_reward import code_of, outputs_equal, statements_passed
from spmd_rl.data import Dataset
from spmd_rl.envs import Data
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.sandbox import Sandbox
from spmd_rl.tokenizer import Tokenizer


class Code:
    """The reward is 1 if all tests pass, and `partial` times the share of them otherwise."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        path: str,  # a .jsonl or .parquet file, or a folder of them
        eval_path: str = "",
        holdout: int = 0,  # rows at the end that are evaluated instead of trained on
        max_epochs: int = 0,  # 0: no end
        question: str = "question",  # column
        tests: str = "tests",  # column
        prompt: str = "{question}\nReply with one ```python block.",
        partial: float = 0.0,
        timeout_s: float = 5.0,  # of a run
        memory_mib: int = 1024,  # of a run
        num_processes: int = 4,  # runs at a time, per inference rank
    ) -> None:
        fields = {"question": question, "tests": tests}
        rows = Dataset(path=path, fields=fields, eval_path=eval_path, holdout=holdout, max_epochs=max_epochs)
        self.tasks = rows.tasks
        self._prompt, self._partial = prompt, partial
        self._sandbox = Sandbox(num=num_processes, timeout_s=timeout_s, memory_bytes=memory_mib << 20)
        self.rollout = SingleTurn(tokenizer=tokenizer, prompt=self.prompt, reward=self.reward).rollout

    def prompt(self, data: Data) -> str:
        return self._prompt.format(question=data["question"])

    async def reward(self, data: Data, reply: str) -> float:
        program, tests = code_of(reply), data["tests"]
        if not tests:
            raise ValueError("a row without tests")
        judge = statements_passed if isinstance(tests[0], str) else outputs_equal
        share = await judge(self._sandbox, program, tests)
        return 1.0 if share == 1.0 else self._partial * share
