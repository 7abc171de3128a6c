import asyncio
import json
from itertools import islice

import pytest

from spmd_rl import envs
from spmd_rl.envs.calculator import Calculator, calculate
from spmd_rl.envs.choice import Choice, chosen, right
from spmd_rl.envs.code import Code
from spmd_rl.envs.guess import Guess
from spmd_rl.envs.python_tool import PythonTool
from spmd_rl.envs.questions import Questions
from spmd_rl.envs.reasoning_gym import ReasoningGym, extracted
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.processes.workers import TimedOut
from spmd_rl.types import Task
from tests.says import Says, trained_text, write_folder

GSM8K = {"question": "Tom has 3 boxes of 4. How many?", "answer": "3 * 4 = <<3*4=12>>12\n#### 1,012"}


@pytest.fixture
def tokenizer(tmp_path) -> Tokenizer:
    return Tokenizer(write_folder(tmp_path))


def rows(tmp_path, *rows_) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_))
    return str(path)


def play(env, data, policy):
    async def main():
        try:
            return await env.rollout(Task(env="", task_id="t", data=data), policy)
        finally:
            if hasattr(env, "_workers"):
                await env._workers.close()

    return asyncio.run(main())


def says(tokenizer, *texts):
    return Says(tokenizer, *(f"{text}<|end|>" for text in texts))


def test_gsm8k_is_read_as_it_is(tokenizer, tmp_path):
    env = envs.load("spmd_rl.envs.questions:Questions", tokenizer=tokenizer, args={"path": rows(tmp_path, GSM8K)})
    task = next(env.tasks(0, "train"))
    policy = says(tokenizer, "3 boxes of 4 are 12, and so on: 1012.")
    assert play(env, task.data, policy).reward == 1.0
    assert policy.asked[0][0] == f"<|start|>user\n{GSM8K['question']}<|end|>\n<|start|>assistant\n"
    assert play(env, task.data, says(tokenizer, "12")).reward == 0.0


def test_a_form_that_does_not_end_fails_its_sample_by_name(tokenizer, tmp_path):
    path, form = rows(tmp_path, {"question": "?", "answer": "1"}), r"(\S+\s*)+\."
    env = Questions(tokenizer=tokenizer, path=path, form=form, timeout_s=0.5)
    with pytest.raises(TimedOut, match=r"questions: form = .* did not end within 0\.5 s \(timeout_s\)"):
        play(env, next(env.tasks(0, "train")).data, says(tokenizer, "word " * 40))


def test_questions_come_from_other_columns_with_a_form_that_counts(tokenizer, tmp_path):
    env = Questions(
        tokenizer=tokenizer,
        path=rows(tmp_path, {"problem": "Capital of France?", "solution": "Paris"}),
        question="problem",
        answer="solution",
        judge="word",
        form=r"<think>.*</think>.*",
        form_weight=0.3,
        system="Think.",
    )
    data = next(env.tasks(0, "train")).data
    rollout = play(env, data, says(tokenizer, "It is Paris"))
    assert (rollout.reward, rollout.reward_parts) == (0.7, {"answer": 1.0, "form": 0.0})
    assert play(env, data, says(tokenizer, "<think>hm</think>Rome")).reward == 0.3


def test_mathematical_answers_are_verified_in_a_worker(tokenizer, tmp_path):
    pytest.importorskip("math_verify")
    path = rows(tmp_path, {"question": "Half?", "answer": "\\frac{1}{2}"})
    env = Questions(tokenizer=tokenizer, path=path, judge="math", timeout_s=60.0)
    assert play(env, next(env.tasks(0, "train")).data, says(tokenizer, "$0.5$")).reward == 1.0


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"),
        ("(C)", "C"),
        ("Answer: B. A dog is no cat.", "B"),
        ("The answer is **D**", "D"),
        ("A, no: B", "B"),
        ("Because", None),
        ("E", None),
        ("b", "B"),
    ],
)
def test_the_letter_of_a_reply_is_found(reply, letter):
    assert chosen(reply, ["a cat", "a dog", "a bird", "a fish"]) == letter


def test_the_right_choice_is_a_letter_a_number_or_its_text(tokenizer, tmp_path):
    choices = ["red", "green"]
    assert [right(a, choices) for a in ("B", "b ", 1, "green")] == ["B"] * 4
    with pytest.raises(ValueError, match=r"the answer 'C' \(str\) is none of"):
        right("C", choices)
    env = Choice(tokenizer=tokenizer, path=rows(tmp_path, {"question": "Grass?", "choices": choices, "answer": 1}))
    data = next(env.tasks(0, "train")).data
    policy = says(tokenizer, "B) green")
    assert play(env, data, policy).reward == 1.0
    assert "Grass?\nA) red\nB) green\nReply" in policy.asked[0][0]
    assert play(env, data, says(tokenizer, "A")).reward == 0.0


def test_a_guesser_is_told_higher_and_lower_and_rewarded_once(tokenizer):
    policy = says(tokenizer, "50", "is it 20?", "30")
    rollout = play(Guess(tokenizer=tokenizer), {"number": 30}, policy)
    assert [asked[0].split("\n")[-3].removesuffix("<|end|>") for asked in policy.asked[1:]] == ["lower", "higher"]
    assert trained_text(tokenizer, rollout) == "50<|end|>is it 20?<|end|>30<|end|>"
    assert rollout.reward == pytest.approx(0.7 + 0.2 * 4 / 6 + 0.1)
    assert (rollout.num_turns, rollout.segments) == (3, [])


def test_a_guesser_who_never_finds_it_gets_what_its_numbers_are_worth(tokenizer):
    rollout = play(Guess(tokenizer=tokenizer, max_turns=2), {"number": 30}, says(tokenizer, "what?", "31"))
    assert (rollout.reward, rollout.reward_parts["numbers"]) == (0.05, 0.5)


def test_a_guess_that_is_cut_off_ends_the_game(tokenizer):
    policy = Says(tokenizer, "29", finish_reason="length")
    rollout = play(Guess(tokenizer=tokenizer), {"number": 30}, policy)
    assert (rollout.num_turns, rollout.finish_reason) == (1, "length")


def test_the_calculator_answers_a_call_and_the_model_then_answers(tokenizer):
    policy = says(tokenizer, "<calc>12 * (3 + 4)</calc>", "It is 84.")
    rollout = play(Calculator(tokenizer=tokenizer), {"expression": "12 * (3 + 4)", "answer": "84"}, policy)
    assert policy.asked[1][0].endswith("<|start|>user\n= 84<|end|>\n<|start|>assistant\n")
    assert (rollout.reward, rollout.reward_parts) == (1.0, {"answer": 1.0, "call": 1.0})
    assert trained_text(tokenizer, rollout) == "<calc>12 * (3 + 4)</calc><|end|>It is 84.<|end|>"


def test_a_call_that_cannot_be_computed_is_answered_with_an_error(tokenizer):
    policy = says(tokenizer, "<calc>2 ** 9</calc>", "512")
    rollout = play(Calculator(tokenizer=tokenizer, tool_role="tool"), {"expression": "x", "answer": "512"}, policy)
    assert "<|start|>tool\nerror: only numbers, + - * / // % and parentheses<|end|>" in policy.asked[1][0]
    assert rollout.reward_parts == {"answer": 1.0, "call": 0.0}


def test_calls_end_after_so_many(tokenizer):
    policy = says(tokenizer, *["<calc>1</calc>"] * 3)
    assert play(Calculator(tokenizer=tokenizer, max_calls=2), {"expression": "1", "answer": "1"}, policy).num_turns == 3


def test_calculator_tasks_have_the_right_answers(tokenizer):
    for task in islice(Calculator(tokenizer=tokenizer).tasks(0, "train"), 50):
        assert int(task.data["answer"]) == eval(task.data["expression"])


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2 * 3", "7"), ("-(2 - 5)", "3"), ("1 / 3", "0.3333333333"), ("7 // 2 % 2", "1"), ("0.1 + 0.2", "0.3")],
)
def test_expressions_are_computed(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "1 / 0",
        "9 ** 9",
        "__import__('os')",
        "x",
        "1 +",
        "(" * 150,
        "1" * 300,
        "True",
        "'a' * 9",
        "\0",
        "1e999999999 * 2",
    ],
)
def test_what_is_no_expression_is_an_error(expression):
    with pytest.raises(ValueError):
        calculate(expression)


def test_python_runs_what_the_model_wrote_and_shows_the_output(tokenizer, tmp_path):
    env = PythonTool(tokenizer=tokenizer, path=rows(tmp_path, GSM8K))
    policy = says(tokenizer, "```python\nprint(1000 + 3 * 4)\n```", "So 1012")
    rollout = play(env, next(env.tasks(0, "train")).data, policy)
    assert policy.asked[1][0].endswith("<|start|>user\n1012<|end|>\n<|start|>assistant\n")
    assert (rollout.reward, rollout.reward_parts) == (1.0, {"answer": 1.0, "ran": 1.0})


def test_python_that_fails_or_hangs_is_told_so(tokenizer, tmp_path):
    env = PythonTool(tokenizer=tokenizer, path=rows(tmp_path, GSM8K), timeout_s=1.0)
    policy = says(tokenizer, "```python\n1/0\n```", "```python\nwhile True: pass\n```", "7")
    rollout = play(env, GSM8K, policy)
    assert "ZeroDivisionError: division by zero<|end|>" in policy.asked[1][0]
    assert "error: it took too long<|end|>" in policy.asked[2][0]
    assert rollout.reward_parts == {"answer": 0.0, "ran": 0.0}


def test_an_answer_without_code_leaves_that_part_out(tokenizer, tmp_path):
    env = PythonTool(tokenizer=tokenizer, path=rows(tmp_path, GSM8K))
    assert play(env, GSM8K, says(tokenizer, "1012")).reward_parts == {"answer": 1.0}


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (["assert double(2) == 4", "assert double(1) == 3"], "def double(x):\n    return 2 * x"),
        ([["2", "4"], ["1", "3"]], "print(2 * int(input()))"),
    ],
)
def test_programs_are_rewarded_for_all_tests_or_a_part_of_them(tokenizer, tmp_path, tests, program):
    path = rows(tmp_path, {"question": "Double it.", "tests": tests})
    reply = f"Here:\n```python\n{program}\n```"
    data = {"question": "x", "tests": tests}
    assert play(Code(tokenizer=tokenizer, path=path), data, says(tokenizer, reply)).reward == 0
    some = Code(tokenizer=tokenizer, path=path, partial=0.5)
    assert play(some, data, says(tokenizer, reply)).reward == 0.25
    assert play(some, {"question": "x", "tests": tests[:1]}, says(tokenizer, reply)).reward == 1.0
    with pytest.raises(ValueError, match="a row without tests"):
        play(some, {"question": "x", "tests": []}, says(tokenizer, reply))


def test_reasoning_gym_makes_and_scores_its_tasks(tokenizer):
    pytest.importorskip("reasoning_gym")
    env = ReasoningGym(tokenizer=tokenizer, name="chain_sum", settings={"min_terms": 2, "max_terms": 2}, timeout_s=60.0)
    tasks = list(islice(env.tasks(0, "train"), 3))
    assert [t.task_id for t in tasks] == [t.task_id for t in islice(env.tasks(0, "train"), 3)]
    assert tasks[0].task_id != next(env.tasks(0, "eval")).task_id
    expression = tasks[0].data["question"].split(":")[1].strip().removesuffix(" =")
    policy = says(tokenizer, f"so <answer>{eval(expression)}</answer>")
    assert play(env, tasks[0].data, policy).reward == 1.0
    env = ReasoningGym(tokenizer=tokenizer, name="chain_sum", extract="number", timeout_s=60.0)
    assert play(env, tasks[0].data, says(tokenizer, "no idea")).reward == 0.0


def test_answers_are_extracted_in_the_chosen_way():
    reply = "so 3 <answer> 4 </answer>"
    assert [extracted(reply, how) for how in ("tags", "number", "reply")] == ["4", "4", reply]
    assert extracted("none", "tags") is None
    said = ("so 1e5", "half is 1/2", "2.50", "none")
    assert [extracted(one, "number") for one in said] == ["100000", "1/2", "2.50", None]


@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        (
            "spmd_rl.envs.questions:Questions",
            {"path": "x", "judge": "llm"},
            "judge = 'llm': must be one of number, exact",
        ),
        ("spmd_rl.envs.questions:Questions", {}, "missing a required argument: 'path'; its settings: path, eval_path"),
        ("spmd_rl.envs.guess:Guess", {"most": 1}, "most = 1 must be at least 2"),
        ("spmd_rl.envs.calculator:Calculator", {"terms": 1}, "terms = 1"),
        (
            "spmd_rl.envs.reasoning_gym:ReasoningGym",
            {"name": "x", "extract": "y"},
            "extract = 'y': must be one of tags",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(tokenizer, path, args, message):
    with pytest.raises(ValueError, match=message):
        envs.load(path, tokenizer=tokenizer, args=args)
