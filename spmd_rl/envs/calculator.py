"""Sums that are too long to do in the head, with a calculator to call.

The model writes <calc>12 * 34</calc> and ends its turn; the next message is the result, and then it answers.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

from spmd_rl.envs.chat import Chat, with_tool
from spmd_rl.envs.environment import Generate, drawn, judged
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rewards.text import between, last_number_equals
from spmd_rl.types import Rollout, Task

SYSTEM = (
    "You have a calculator. To use it, write an expression as in <calc>12 * 34</calc> and stop; you are then told the "
    "result. Give the final answer as a number."
)
WEIGHTS = {"answer": 0.9, "call": 0.1}
LONGEST = 200  # characters of an expression; no powers, so this bounds the time too
_BINARY: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_BINARY |= {ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
_UNARY: dict[type, Callable[[Fraction], Fraction]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


class Calculator:
    """ "What is 123 * 45 + 678?"; the reward is for the answer, and a little for a call that could be computed."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        digits: int = 3,  # of each number
        terms: int = 3,  # numbers
        max_calls: int = 3,
        tool_role: str = "user",  # of the result's message; "tool" where the chat template knows it
        on_rewrite: str = "segment",  # as in spmd_rl.envs.chat
    ) -> None:
        if digits < 1 or terms < 2 or max_calls < 1:
            raise ValueError(
                f"calculator: digits = {digits} (1), terms = {terms} (2), max_calls = {max_calls} (1): too few"
            )
        self._tokenizer, self._digits, self._terms = tokenizer, digits, terms
        self._max_calls, self._tool_role, self._on_rewrite = max_calls, tool_role, on_rewrite

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return drawn(seed, split, self._draw, key=lambda task: task.task_id)

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        question = {"role": "user", "content": f"What is {task.data['expression']}?"}
        chat = Chat(
            tokenizer=self._tokenizer,
            task=task,
            generate=generate,
            messages=[{"role": "system", "content": SYSTEM}, question],
            on_rewrite=self._on_rewrite,
        )
        computed = 0

        async def tool(reply: str) -> str | None:
            nonlocal computed
            expression = between(reply, "<calc>", "</calc>")
            if expression is None:
                return None
            try:
                result = calculate(expression)
            except ValueError as error:
                return f"error: {error}"
            computed += 1
            return f"= {result}"

        reply = await with_tool(chat, tool, role=self._tool_role, max_calls=self._max_calls)
        answer = last_number_equals(reply, task.data["answer"])
        return judged(chat.rollout, {"answer": answer, "call": float(computed > 0)}, WEIGHTS)

    def _draw(self, rng: random.Random) -> Task:
        low, high = 10 ** (self._digits - 1), 10**self._digits - 1
        words = [str(rng.randint(low, high))]
        for _ in range(self._terms - 1):
            words += [rng.choice("+-*"), str(rng.randint(low, high))]
        expression = " ".join(words)
        return Task(env="", task_id=expression, data={"expression": expression, "answer": calculate(expression)})


def calculate(expression: str) -> str:
    """The value of + - * / // % and parentheses, exact where it is whole; ValueError says what is wrong."""
    if len(expression) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return str(value.numerator) if value.denominator == 1 else format(float(value), ".10g")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return Fraction(str(value))
        case ast.BinOp(op=op) if type(op) in _BINARY:
            return Fraction(_BINARY[type(op)](_value(node.left), _value(node.right)))
        case ast.UnaryOp(op=op) if type(op) in _UNARY:
            return Fraction(_UNARY[type(op)](_value(node.operand)))
    raise ValueError("only numbers, + - * / // % and parentheses")
