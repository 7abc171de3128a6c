"""Multiple choice from a file: the letter that the reply ends with is judged.

The answer's column holds the letter, the number of the choice (from 0) or its text.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from spmd_rl.data import Dataset
from spmd_rl.envs import Data
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.tokenizer import Tokenizer


class Choice:
    """Rows with a question, a list of choices and the right one."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        path: str,  # a .jsonl or .parquet file, or a folder of them
        eval_path: str = "",
        holdout: int = 0,  # rows at the end that are evaluated instead of trained on
        max_epochs: int = 0,  # 0: no end
        question: str = "question",  # column
        choices: str = "choices",  # column
        answer: str = "answer",  # column
        prompt: str = "{question}\n{choices}\nReply with the letter of the right answer.",
    ) -> None:
        fields = {"question": question, "choices": choices, "answer": answer}
        rows = Dataset(path=path, fields=fields, eval_path=eval_path, holdout=holdout, max_epochs=max_epochs)
        self.tasks = rows.tasks
        self._prompt = prompt
        self.rollout = SingleTurn(tokenizer=tokenizer, prompt=self.prompt, reward=self.reward).rollout

    def prompt(self, data: Data) -> str:
        lines = [f"{letter}) {text}" for letter, text in zip(string.ascii_uppercase, data["choices"], strict=False)]
        return self._prompt.format(question=data["question"], choices="\n".join(lines))

    def reward(self, data: Data, reply: str) -> float:
        return float(chosen(reply, len(data["choices"])) == right(data["answer"], data["choices"]))


def right(answer: object, choices: Sequence[str]) -> str:
    """The letter of the right choice; ValueError where the row does not say it."""
    letters = string.ascii_uppercase[: len(choices)]
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return letters[answer]
    if answer in choices:
        return letters[list(choices).index(answer)]
    if isinstance(answer, str) and len(letter := answer.strip().upper()) == 1 and letter in letters:
        return letter
    raise ValueError(f"the answer {answer!r} is none of {list(choices)}, nor a letter or number of one")


def chosen(reply: str, num: int) -> str | None:
    """The letter after the last "answer is" or "answer:", else the last letter that stands alone."""
    letter = rf"\(?([A-{string.ascii_uppercase[num - 1]}])(?![\w'])"
    named = re.findall(rf"(?i:answer(?:\s+is)?)\s*:?\s*\**{letter}", reply)
    alone = re.findall(rf"(?<![\w']){letter}", reply)
    return (named or alone or [None])[-1]
