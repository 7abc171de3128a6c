"""Questions with known answers from a file: GSM8K as it is, and any rows by naming their columns.

[env.gsm8k]
path = "spmd_rl.envs.questions:Questions"
args = { path = "data/train.jsonl", eval_path = "data/test.jsonl", max_epochs = 3 }
"""

from __future__ import annotations

import re
from collections.abc import Callable

from spmd_rl.diagnostics.user_code import shown
from spmd_rl.envs.answers import answers_of, checked_answer
from spmd_rl.envs.dataset import Dataset
from spmd_rl.envs.environment import Data
from spmd_rl.envs.prompts import Prompt
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.files.row_files import Row
from spmd_rl.model.tokenizer import Messages, Tokenizer
from spmd_rl.processes.workers import TimedOut, Workers
from spmd_rl.rewards.math_expression import math_equals
from spmd_rl.rewards.text import contains_word, exact, last_number_equals, matches

JUDGES = ("number", "exact", "word", "math")


class Questions:
    """The reward is that of the answer; with `form`, a share of it is for the reply's form."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        path: str,  # a file of rows (.jsonl, .json, .csv, .parquet, …), or a folder of them
        eval_path: str = "",
        holdout: int = 0,  # rows at the end that are evaluated instead of trained on
        max_epochs: int = 0,  # 0: no end
        question: str = "question",  # column: a text, or a list of messages
        answer: str = "answer",  # column: a text or number, or a list of them of which each is right
        answer_after: str = "####",  # the answer proper follows this mark, where there is one; "" for none
        judge: str = "number",  # number: the reply's last one | exact | word: stands in the reply | math: math-verify
        tolerance: float = 0.0,  # of judge = number
        prompt: str = "{question}",  # other columns are filled in by name too
        system: str = "",
        form: str = "",  # regular expression of the whole reply
        form_weight: float = 0.1,
        timeout_s: float = 10.0,  # of judge = math and of form
    ) -> None:
        if judge not in JUDGES:
            raise ValueError(f"questions: judge = {judge!r}: must be one of {', '.join(JUDGES)}")
        try:
            re.compile(form)
        except re.error as error:
            raise ValueError(f"questions: form = {form!r} is no regular expression: {error}") from error
        self._prompt = Prompt(prompt, system=system, column=question, hidden=[answer])
        self.tasks = Dataset(
            path=path,
            fields={"question": question, "answer": answer},
            optional=self._prompt.columns,
            check=self._check,
            eval_path=eval_path,
            holdout=holdout,
            max_epochs=max_epochs,
        ).tasks
        self._column, self._mark = answer, answer_after
        self._judge, self._tolerance, self._form = judge, tolerance, form
        self._workers = Workers(timeout_s=timeout_s)
        weights = {"answer": 1.0 - form_weight, "form": form_weight} if form else None
        self.rollout = SingleTurn(
            tokenizer=tokenizer, prompt=self.prompt, reward=self.reward, weights=weights, rule=form
        ).rollout

    def prompt(self, data: Data) -> Messages:
        return self._prompt.messages(data)

    def _check(self, row: Row) -> Row:
        answer = checked_answer(row["answer"], self._column, mark=self._mark, judge=self._judge)
        return self._prompt.check(row) | {"answer": answer}

    async def reward(self, data: Data, reply: str) -> dict[str, float | None]:
        answers = answers_of(data["answer"], self._mark)
        form = await self._timed(f"form = {self._form!r}", matches, reply, self._form) if self._form else None
        return {"answer": await self._score(reply, answers), "form": form}

    async def _timed(self, what: str, function: Callable[..., float], *args: object) -> float:
        try:
            score: float = await self._workers.call(function, *args)
            return score
        except TimedOut as error:
            raise TimedOut(f"questions: {what}: {error} (timeout_s)") from None

    async def _score(self, reply: str, answers: list[str]) -> float:
        match self._judge:
            case "number":
                return max(last_number_equals(reply, answer, tolerance=self._tolerance) for answer in answers)
            case "exact":
                return max(exact(reply, answer) for answer in answers)
            case "word":
                return max(contains_word(reply, answer) for answer in answers)
            case _:
                return await self._timed(f"judge = 'math', answer {shown(answers)}", math_equals, reply, answers)
