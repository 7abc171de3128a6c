"""Programming tasks from a file, judged by running the reply's code against the row's tests in a sandbox.

Rows have a question and tests: statements such as "assert add(2, 3) == 5", or pairs of input and output.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping

from spmd_rl.diagnostics.user_code import shown
from spmd_rl.envs.dataset import Dataset
from spmd_rl.envs.environment import Data
from spmd_rl.envs.prompts import Prompt, json_in
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.files.row_files import Row
from spmd_rl.model.tokenizer import Messages, Tokenizer
from spmd_rl.processes.sandbox import Sandbox
from spmd_rl.rewards.program_tests import code_of, outputs_equal, statements_passed

Tests = list[str] | list[list[str]]
WANTED = (
    'wanted is a list of statements of Python, or of [input, output], or {"inputs": […], "outputs": […]}, or a text '
    "with one of these as JSON or with the statements of one test"
)


class Code:
    """The reward is 1 if all tests pass, and `partial` times the share of them otherwise."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        path: str,  # a file of rows (.jsonl, .json, .csv, .parquet, …), or a folder of them
        eval_path: str = "",
        holdout: int = 0,  # rows at the end that are evaluated instead of trained on
        max_epochs: int = 0,  # 0: no end
        question: str = "question",  # column: a text, or a list of messages
        tests: str = "tests",  # column, as `tests_of` reads it
        prompt: str = "{question}\nReply with one ```python block.",  # {tests} are those of the row
        partial: float = 0.0,
        timeout_s: float = 5.0,  # of a run
        memory_mib: int = 1024,  # of a run
        num_processes: int = 4,  # runs at a time, per inference rank
        isolation: str = "namespaces",  # or "bubblewrap", for machines that let only that make namespaces
        require_isolation: bool = True,  # false: where it cannot be isolated, code sees and reaches what you do
    ) -> None:
        self._prompt = Prompt(prompt, given=["tests"], column=question)
        self.tasks = Dataset(
            path=path,
            fields={"question": question, "tests": tests},
            optional=self._prompt.columns,
            check=self._check,
            eval_path=eval_path,
            holdout=holdout,
            max_epochs=max_epochs,
        ).tasks
        self._column, self._partial = tests, partial
        self._sandbox = Sandbox(
            num=num_processes,
            timeout_s=timeout_s,
            memory_bytes=memory_mib << 20,
            isolation=isolation,
            require_isolation=require_isolation,
        )
        self.says = [self._sandbox.says]
        self.rollout = SingleTurn(tokenizer=tokenizer, prompt=self.prompt, reward=self.reward).rollout

    def prompt(self, data: Data) -> Messages:
        tests = [test if isinstance(test, str) else f"Input:\n{test[0]}\nOutput:\n{test[1]}" for test in data["tests"]]
        return self._prompt.messages(data, tests="\n".join(tests))

    def _check(self, row: Row) -> Row:
        try:
            tests = tests_of(row["tests"])
        except ValueError as error:
            raise ValueError(f"column {self._column!r}: {error}") from None
        return self._prompt.check(row) | {"tests": tests}

    async def reward(self, data: Data, reply: str) -> float:
        program, tests = code_of(reply), data["tests"]
        if not tests:
            raise ValueError("a row without tests")
        judge = statements_passed if isinstance(tests[0], str) else outputs_equal
        share = await judge(self._sandbox, program, tests)
        return 1.0 if share == 1.0 else self._partial * share


def tests_of(value: object) -> Tests:
    """Statements, or [input, output] pairs; ValueError for what is neither, or can fail no program."""
    value = json_in(value, ("[", "{"))
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        value = _pairs_of_columns(value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{shown(value)} has no tests; {WANTED}")
    if all(isinstance(test, str) for test in value):
        return _statements(value)
    return [_pair(test) for test in value]


def _pairs_of_columns(value: Mapping[str, object]) -> list[object]:
    """Of APPS and its like: inputs and outputs, each a list."""
    if value.get("fn_name") is not None:
        raise ValueError(f"fn_name = {value['fn_name']!r}: calls of a function are no input and output; {WANTED}")
    inputs, outputs = (value.get(f"{name}s", value.get(name)) for name in ("input", "output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"{shown(value)} has no inputs and as many outputs; {WANTED}")
    return [[stdin, stdout] for stdin, stdout in zip(inputs, outputs, strict=True)]


def _pair(test: object) -> list[str]:
    if isinstance(test, Mapping) and test.keys() - {"testtype", "type"} == {"input", "output"}:
        if test.get("testtype", test.get("type")) not in (None, "stdin", "stdin_stdout"):
            raise ValueError(f"the test {shown(test)} is not of input and output; {WANTED}")
        test = [test["input"], test["output"]]
    if not isinstance(test, list) or len(test) != 2 or not all(isinstance(text, str) for text in test):
        raise ValueError(f"the test {shown(test)} is no statement and no pair of texts, or not as the others; {WANTED}")
    return test


def _statements(tests: list[str]) -> list[str]:
    can_fail = False
    for test in tests:
        try:
            with warnings.catch_warnings(action="ignore"):  # of "\\d" and the like
                body = ast.parse(test).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"the test {shown(test)} is no Python ({error}); {WANTED}") from None
        if not body:
            raise ValueError(f"the test {shown(test)} is empty; {WANTED}")
        if any(isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and node.test.elts for node in body):
            raise ValueError(f"the test {shown(test)} asserts a tuple, which is always true: leave out its parentheses")
        can_fail = can_fail or any(_can_fail(node) for node in body)
    if not can_fail:
        raise ValueError(f"{shown(tests)} calls and asserts nothing, so that every program passes; {WANTED}")
    return tests


def _can_fail(node: ast.stmt) -> bool:
    """Whether a statement does more than define, import or name something."""
    defines = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
    acts = ast.Assert | ast.Call | ast.Raise
    return not isinstance(node, defines) and any(isinstance(inner, acts) for inner in ast.walk(node))
