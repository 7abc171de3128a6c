"""Questions from a file, with Python to call: the model writes a ```python block, is told its output, then answers.

The code runs in `spmd_rl.processes.sandbox`, which says what that keeps out.
"""

from __future__ import annotations

from spmd_rl.envs.answers import answers_of, checked_answer
from spmd_rl.envs.chat import Chat, with_tool
from spmd_rl.envs.dataset import Dataset
from spmd_rl.envs.environment import Generate, judged
from spmd_rl.envs.prompts import Prompt
from spmd_rl.files.row_files import Row
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.processes.sandbox import Execution, Sandbox
from spmd_rl.rewards.program_tests import code_of
from spmd_rl.rewards.text import last_number_equals
from spmd_rl.types import Rollout, Task

SYSTEM = (
    "You can run Python. To do so, write a ```python block that prints what you need, and stop; you are then told the "
    "output. Give the final answer as a number."
)
LONGEST = 2000  # characters of the output that the model is shown


class PythonTool:
    """The reward is 1 for the right number at the end; whether the code ran is logged beside it."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        path: str,  # a file of rows (.jsonl, .json, .csv, .parquet, …), or a folder of them
        eval_path: str = "",
        holdout: int = 0,  # rows at the end that are evaluated instead of trained on
        max_epochs: int = 0,  # 0: no end
        question: str = "question",  # column: a text, or a list of messages without a system message
        answer: str = "answer",  # column: a number, or a list of them of which each is right
        answer_after: str = "####",  # the answer proper follows this mark, where there is one
        max_calls: int = 3,
        timeout_s: float = 5.0,  # of a run
        memory_mib: int = 1024,  # of a run
        num_processes: int = 4,  # runs at a time, per inference rank
        isolation: str = "namespaces",  # or "bubblewrap", for machines that let only that make namespaces
        require_isolation: bool = True,  # false: where it cannot be isolated, code sees and reaches what you do
        tool_role: str = "user",  # of the output's message; "tool" where the chat template knows it
        on_rewrite: str = "segment",  # as in spmd_rl.envs.chat
    ) -> None:
        self._prompt = Prompt(system=SYSTEM, column=question, hidden=[answer])
        fields = {"question": question, "answer": answer}
        self.tasks = Dataset(
            path=path, fields=fields, check=self._check, eval_path=eval_path, holdout=holdout, max_epochs=max_epochs
        ).tasks
        self._tokenizer, self._column, self._mark, self._max_calls = tokenizer, answer, answer_after, max_calls
        self._tool_role, self._on_rewrite = tool_role, on_rewrite
        self._sandbox = Sandbox(
            num=num_processes,
            timeout_s=timeout_s,
            memory_bytes=memory_mib << 20,
            isolation=isolation,
            require_isolation=require_isolation,
        )
        self.says = [self._sandbox.says]

    def _check(self, row: Row) -> Row:
        answer = checked_answer(row["answer"], self._column, mark=self._mark, judge="number")
        return self._prompt.check(row) | {"answer": answer}

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        chat = Chat(
            tokenizer=self._tokenizer,
            task=task,
            generate=generate,
            messages=self._prompt.messages(task.data),
            on_rewrite=self._on_rewrite,
        )
        runs: list[Execution] = []

        async def tool(reply: str) -> str | None:
            if "```" not in reply:
                return None
            runs.append(await self._sandbox.run(code_of(reply)))
            return shown(runs[-1])

        reply = await with_tool(chat, tool, role=self._tool_role, max_calls=self._max_calls)
        answer = max(last_number_equals(reply, one) for one in answers_of(task.data["answer"], self._mark))
        ran = sum(run.ok for run in runs) / len(runs) if runs else None
        return judged(chat.rollout, {"answer": answer, "ran": ran}, {"answer": 1.0, "ran": 0.0})


def shown(run: Execution) -> str:
    """What the model is told of a run: the output, or the end of the error."""
    if run.timed_out:
        return "error: it took too long"
    text = run.stdout if run.ok else run.stderr[-LONGEST:].strip() or f"error: exit code {run.exit_code}"
    return text[:LONGEST].strip() or "(it printed nothing)"
