"""Questions with known answers from a file: GSM8K as it is, and any rows of JSONL or Parquet by naming their columns.

[env.gsm8k]
path = "spmd_rl.envs.questions:Questions"
args = { path = "data/train.jsonl", eval_path = "data/test.jsonl", max_epochs = 3 }
"""

from __future__ import annotations

from spmd_rl.data import Dataset
from spmd_rl.envs import Data
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.math_reward import math_equals
from spmd_rl.rewards import after, contains_word, exact, last_number_equals, matches
from spmd_rl.tokenizer import Messages, Tokenizer
from spmd_rl.workers import Workers

JUDGES = ("number", "exact", "word", "math")


class Questions:
    """The reward is that of the answer; with `form`, a share of it is for the reply's form."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        path: str,  # a .jsonl or .parquet file, or a folder of them
        eval_path: str = "",
        holdout: int = 0,  # rows at the end that are evaluated instead of trained on
        max_epochs: int = 0,  # 0: no end
        question: str = "question",  # column
        answer: str = "answer",  # column
        answer_after: str = "####",  # the answer proper follows this mark, where there is one
        judge: str = "number",  # number: the reply's last one | exact | word: stands in the reply | math: math-verify
        tolerance: float = 0.0,  # of judge = number
        prompt: str = "{question}",
        system: str = "",
        form: str = "",  # regular expression of the whole reply
        form_weight: float = 0.1,
        timeout_s: float = 10.0,  # of judge = math
    ) -> None:
        if judge not in JUDGES:
            raise ValueError(f"questions: judge = {judge!r}: must be one of {', '.join(JUDGES)}")
        fields = {"question": question, "answer": answer}
        rows = Dataset(path=path, fields=fields, eval_path=eval_path, holdout=holdout, max_epochs=max_epochs)
        self.tasks = rows.tasks
        self._mark, self._judge, self._tolerance = answer_after, judge, tolerance
        self._prompt, self._system, self._form = prompt, system, form
        self._workers = Workers(timeout_s=timeout_s)
        weights = {"answer": 1.0 - form_weight, "form": form_weight} if form else None
        self.rollout = SingleTurn(
            tokenizer=tokenizer, prompt=self.prompt, reward=self.reward, weights=weights, rule=form
        ).rollout

    def prompt(self, data: Data) -> Messages:
        user = {"role": "user", "content": self._prompt.format(question=data["question"])}
        return [{"role": "system", "content": self._system}, user] if self._system else [user]

    async def reward(self, data: Data, reply: str) -> dict[str, float | None]:
        answer = after(str(data["answer"]), self._mark)
        return {"answer": await self._score(reply, answer), "form": matches(reply, self._form) if self._form else None}

    async def _score(self, reply: str, answer: str) -> float:
        match self._judge:
            case "number":
                return last_number_equals(reply, answer, tolerance=self._tolerance)
            case "exact":
                return exact(reply, answer)
            case "word":
                return contains_word(reply, answer)
            case _:
                return await self._workers.call(math_equals, reply, answer)
