"""Rows as other people have them: each is played rightly, or refused before the first task with its place."""

import asyncio
import datetime
import gzip
import json
from itertools import islice

import pytest

from spmd_rl import envs
from spmd_rl.envs.dataset import Dataset
from spmd_rl.envs.environment import checked_tasks
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import Task
from tests.says import Says, write_folder

QUESTIONS, CHOICE = "spmd_rl.envs.questions:Questions", "spmd_rl.envs.choice:Choice"
CODE, TOOL = "spmd_rl.envs.code:Code", "spmd_rl.envs.python_tool:PythonTool"
QA = {"question": "Q?", "answer": "18"}
ABC = {"question": "Q?", "choices": ["red", "green"], "answer": "B"}
ADDS = "```python\ndef f(x): return x + 1\n```"
MESSAGES = [{"role": "system", "content": "S."}, {"role": "user", "content": "M?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(write_folder(tmp_path_factory.mktemp("tokenizer")))


def write(path, rows):
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    else:
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def played(tokenizer, env_path, args, reply):
    """(prompt, reward) of row 1."""
    env = envs.load(env_path, tokenizer=tokenizer, args=args)
    task = next(t for t in islice(checked_tasks("e", env, seed=0, split="train"), 5) if t.task_id == "0")
    task = task.of("e")
    policy = Says(tokenizer, *[f"{reply}<|end|>"] * 3)

    async def main():
        try:
            return await env.rollout(Task(env="", task_id="0", data=task.data), policy)
        finally:
            if hasattr(env, "_workers"):
                await env._workers.close()

    rollout = asyncio.run(main())
    return policy.asked[0][0], rollout.reward


def user(text):
    return f"<|start|>user\n{text}<|end|>\n"


def asked(content, **more):
    return [{"prompt": content, "answer": "18"} | more]


PROMPT = {"question": "prompt"}
RIGHT = [
    (QUESTIONS, [QA | {"answer": [17, 18]}], {}, "18", user("Q?")),
    (QUESTIONS, [QA | {"answer": ["Paris", "paris"]}], {"judge": "exact"}, "paris", user("Q?")),
    (QUESTIONS, [QA | {"answer": '["a", "b"]'}], {"judge": "exact"}, '["a", "b"]', user("Q?")),
    (QUESTIONS, [QA | {"answer": 1e22}], {}, "10000000000000000000000", user("Q?")),
    (QUESTIONS, [QA | {"answer": 1e-7}], {}, "0.0000001", user("Q?")),
    (QUESTIONS, [QA], {"answer_after": ""}, "18", user("Q?")),
    (QUESTIONS, asked(MESSAGES), PROMPT, "18", "<|start|>system\nS.<|end|>\n" + user("M?")),
    (QUESTIONS, asked(MESSAGES[1:]), PROMPT | {"system": "T."}, "18", "<|start|>system\nT.<|end|>\n" + user("M?")),
    (QUESTIONS, asked([MESSAGES[1] | {"tool_calls": [], "name": None}]), PROMPT, "18", user("M?")),
    (QUESTIONS, asked(MESSAGES[1:]), PROMPT | {"prompt": "{question} \\boxed{}"}, "18", user("M? \\boxed{}")),
    (QUESTIONS, asked([{"role": "user", "content": [{"type": "text", "text": "M?"}]}]), PROMPT, "18", user("M?")),
    (QUESTIONS, [QA | {"question": "[{'a': 1}] is what?"}], {}, "18", user("[{'a': 1}] is what?")),
    (QUESTIONS, [QA | {"question": "a\u2028b\x85c"}], {}, "18", user("a\u2028b\x85c")),
    (QUESTIONS, [QA | {"topic": "T {question}"}], {"prompt": "{topic} {x} {question}"}, "18", "T {question} {x} Q?"),
    (
        QUESTIONS,
        [QA | {"a b": "T", "m": {"t": 5}}],
        {"prompt": "{a b} {m.t} {'x': 1} {question}"},
        "18",
        "T 5 {'x': 1} Q",
    ),
    (QUESTIONS, [QA], {"system": "On {question}"}, "18", "<|start|>system\nOn Q?<|end|>\n"),
    (QUESTIONS, [QA | {"input": ""}, QA | {"input": "I"}], {"prompt": "{question}\n{input}"}, "18", user("Q?\n")),
    (QUESTIONS, [{"q": json.dumps({"text": "N?"}), "answer": 18}], {"question": "q.text"}, "18", user("N?")),
    (CHOICE, [ABC | {"choices": {"B": "green", "A": "red"}}], {}, "B", "A) red\nB) green\n"),
    (CHOICE, [ABC | {"choices": {"text": ["r", "g"], "label": ["1", "2"]}, "answer": 1}], {}, "A", "A) r\nB) g\n"),
    (CHOICE, [ABC | {"choices": {"text": ["r", "g"], "label": [1, 2]}, "answer": "2"}], {}, "B", "A) r\nB) g\n"),
    (CHOICE, [ABC | {"choices": ["0", "2", "1"], "answer": 1}], {}, "B", "A) 0\nB) 2\n"),
    (CHOICE, [ABC | {"choices": [3, 4]}], {}, "B", "A) 3\nB) 4\n"),
    (CHOICE, [ABC | {"choices": '["red", "green"]', "answer": "green"}], {}, "B", "A) red\nB) green\n"),
    (CODE, [{"question": "Q?", "tests": "assert f(1) == 2\nassert f(2) == 3"}], {}, ADDS, "Q?"),
    (CODE, [{"question": "Q?", "tests": '["assert (f(1) == 2), 1"]'}], {}, ADDS, "Q?"),
    (
        CODE,
        [{"question": "Q?", "tests": [{"input": "1", "output": "1\n"}]}],
        {},
        "```python\nprint(input())\n```",
        "Q?",
    ),
    (TOOL, asked(MESSAGES[1:]), PROMPT, "18", user("M?")),
]


@pytest.mark.parametrize(("env", "rows", "args", "reply", "prompt"), RIGHT)
def test_it_is_used_as_it_is_meant(tokenizer, tmp_path, env, rows, args, reply, prompt):
    text, reward = played(tokenizer, env, {"path": write(tmp_path / "r.jsonl", rows), **args}, reply)
    assert prompt in text and reward == 1.0


REFUSED = [
    (QUESTIONS, asked("[{'role': 'user', 'content': 'M?'}]"), PROMPT, "line 1: column 'prompt'"),
    (QUESTIONS, asked("[{'content': 'M?', 'role': 'user'}]"), PROMPT, "line 1: column 'prompt'"),
    (QUESTIONS, asked([MESSAGES[1] | {"tool_calls": [1]}]), PROMPT, "message 1: 'tool_calls' is not supported"),
    (QUESTIONS, asked([{"role": "user", "content": " "}]), PROMPT, "'prompt', message 1: its content is empty"),
    (QUESTIONS, asked([{"role": "user", "content": "\ud800"}]), PROMPT, "line 1: column 'prompt'.*surrogates"),
    (QUESTIONS, asked(MESSAGES), PROMPT | {"system": "T."}, "begins with a system message"),
    (QUESTIONS, asked([{"from": "human", "value": "M?"}]), PROMPT, "list of messages with role and content"),
    (QUESTIONS, [QA, QA | {"answer": "17 or 18"}, QA | {"answer": None}], {}, "line 2: column 'answer'.*and 1 more"),
    (QUESTIONS, [QA | {"topic": "T"}, QA], {"prompt": "{topic} {question}"}, "line 2: column 'topic'"),
    (QUESTIONS, [QA | {"topic": False}], {"prompt": "{topic} {question}"}, "column 'topic' has False"),
    (QUESTIONS, [QA], {"prompt": "{question} {answer}"}, "would tell the answer"),
    (QUESTIONS, [{"q": "Q?", "r": {"a": 1}}], {"answer": "r.a", "prompt": "{question} {r.a}"}, "would tell the answer"),
    (QUESTIONS, [{"q": "Q?", "r": {"a": 1}}], {"answer": "r", "prompt": "{question} {r.a}"}, "would tell the answer"),
    (QUESTIONS, [{"q": "Q?", "r": {"a": 1}}], {"answer": "r.a", "prompt": "{question} {r}"}, "would tell the answer"),
    (QUESTIONS, [QA | {"topic": 1}], {"prompt": "{question} {topik}"}, "no column 'topik'.*did you mean {topic}"),
    (QUESTIONS, [QA | {"topic": 1}], {"prompt": "{question}", "system": "{Topic}"}, "did you mean {topic}"),
    (QUESTIONS, [QA], {"prompt": "{qestion}"}, "does not contain {question}"),
    (QUESTIONS, ['{"question": "Q?", "answer": 17, "answer": 18}'], {}, "line 1: an object has 'answer' twice"),
    (QUESTIONS, [QA], {"answer": ["answer", "b"]}, "answer"),
    (CHOICE, [ABC | {"choices": [1, 0], "answer": 1}], {}, "column 'answer': the answer 1 is the place"),
    (CHOICE, [ABC | {"choices": ["B", "A"]}], {}, "column 'answer': the answer 'B' is a letter, and the text"),
    (CHOICE, [ABC | {"choices": {"A": "red", "C": "green"}}], {}, "column 'choices' has the labels"),
    (CHOICE, [ABC | {"answer": True}], {}, "column 'answer'"),
    (CHOICE, [ABC, ABC | {"answer": 2}], {}, "line 2: column 'answer'"),
    (CODE, [{"question": "Q?", "tests": ["assert (f(1) == 2, 'no')"]}], {}, "column 'tests'.*asserts a tuple"),
    (CODE, [{"question": "Q?", "tests": ["def check(f): assert f(1)"]}], {}, "every program passes"),
    (CODE, [{"question": "Q?", "tests": {"inputs": ["1"], "outputs": []}}], {}, "column 'tests'.*as many outputs"),
    (TOOL, asked(MESSAGES), PROMPT, "begins with a system message"),
]


@pytest.mark.parametrize(("env", "rows", "args", "message"), REFUSED)
def test_it_is_refused_with_its_place(tokenizer, tmp_path, env, rows, args, message):
    with pytest.raises(ValueError, match=message) as raised:
        played(tokenizer, env, {"path": write(tmp_path / "r.jsonl", rows), **args}, "x")
    assert "\n" not in str(raised.value)


LINE = (json.dumps(QA) + "\n").encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.arrow", b"x", "it has 'b.arrow' too"),
        ("b.jsonl.zst", b"x", "it has 'b.jsonl.zst' too"),
        ("b.parquet.gz", b"x", "it has 'b.parquet.gz' too"),
        ("train", None, "it has 'train' too"),
        ("a.jsonl.gz", gzip.compress(LINE, mtime=0), "the same rows twice"),
        ("b.jsonl", LINE + LINE.replace(b"Q", b"\xe9"), r"b\.jsonl: byte 0xe9 at offset \d+ \(line 2\) is not UTF-8"),
        ("b.jsonl", LINE + b"\0\0\0\0", r"b\.jsonl line 2"),
        ("b.jsonl.gz", gzip.compress(LINE, mtime=0)[:-12], r"b\.jsonl\.gz: gzip cannot read it"),
        ("b.csv", b'question,answer\n"Q?,18\n', r"b\.csv"),
        ("b.json", b"version https://git-lfs.github.com/spec/v1\n", r"b\.json line 1"),
    ],
)
def test_a_folder_is_read_whole_or_refused(tokenizer, tmp_path, name, content, message):
    write(tmp_path / "a.jsonl", LINE)
    for ignored in ("README", "notes.md", ".a.jsonl.swp", "_SUCCESS"):
        write(tmp_path / ignored, b"x")
    assert played(tokenizer, QUESTIONS, {"path": str(tmp_path)}, "18")[1] == 1.0
    (tmp_path / name).mkdir() if content is None else write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        played(tokenizer, QUESTIONS, {"path": str(tmp_path)}, "18")


def test_parquet_has_short_floats_wherever_they_are_and_travels_as_json(tokenizer, tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    inner = pa.struct([("a", pa.float32()), ("several", pa.list_(pa.float32()))])
    day = datetime.date(2026, 1, 5)
    columns = {
        "question": ["Q?", "R?"],
        "r": pa.array([{"a": 0.1, "several": [0.2, 0.3]}] * 2, inner),
        "day": [None, day],
    }
    path = str(tmp_path / "r.parquet")
    parquet.write_table(pa.table(columns), path)
    for answer, reply in (("r.a", "0.1"), ("r.several", "0.3")):
        assert played(tokenizer, QUESTIONS, {"path": path, "answer": answer}, reply)[1] == 1.0
    with pytest.raises(ValueError, match=r"r\.parquet row 2: 'day' cannot travel with its task.*date"):
        next(Dataset(path=path, fields={"day": "day"}).tasks(0, "train"))
