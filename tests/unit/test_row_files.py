"""Files of rows in every format: read rightly, or refused with the place in the file."""

import datetime
import gzip
import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from spmd_rl.envs.choice import Choice
from spmd_rl.envs.code import Code
from spmd_rl.envs.dataset import Dataset, read_rows
from spmd_rl.envs.questions import Questions
from spmd_rl.files.row_files import rows_of, value_at

FIELDS = {"question": "question", "answer": "answer"}
A, B = {"question": "Q é?", "answer": "18"}, {"question": "R?", "answer": "19"}
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (A, B))
ARRAY = json.dumps([A, B], indent=1, ensure_ascii=False)
CSV = 'question,answer\n"Q é?",18\nR?,19\n'


def packed(text: str, encoding: str = "utf-8") -> bytes:
    return gzip.compress(text.encode(encoding), mtime=0)


READ = [
    ("r.jsonl", LINES),
    ("r.JSONL", LINES),
    ("r.ndjson", LINES),
    ("r.json", LINES),
    ("r.json", ARRAY),
    ("r.jsonl", ARRAY),
    ("r.jsonl", f"\n  \n{ARRAY}\n"),
    ("r.json", json.dumps([A, B])),
    ("r.jsonl", LINES.replace("\n", "\r\n")),
    ("r.jsonl", f"\n{LINES}\n   \n"),
    ("r.jsonl", LINES.rstrip("\n")),
    ("r.jsonl", LINES.encode("utf-8-sig")),
    ("r.json", ARRAY.encode("utf-8-sig")),
    ("r.jsonl", "".join(json.dumps(row) + "\n" for row in (A, B))),  # é as \u00e9
    ("r.csv", CSV),
    ("r.csv", CSV.encode("utf-8-sig")),
    ("r.csv", CSV.replace("\n", "\r\n")),
    ("r.csv", "\n" + CSV.replace("R?", "\nR?") + "\n"),
    ("r.csv", 'id,answer,question\n1,18,Q é?\n2,"19","R?"\n'),
    ("r.tsv", CSV.replace(",", "\t")),
    ("r.jsonl.gz", packed(LINES)),
    ("r.json.gz", packed(ARRAY)),
    ("r.csv.gz", packed(CSV)),
    ("r.tsv.gz", packed(CSV.replace(",", "\t"), "utf-8-sig")),
    ("r.jsonl", LINES.replace("}", ', "score": NaN, "of": null}')),  # in columns that nobody uses
]


@pytest.mark.parametrize(("name", "content"), READ)
def test_the_rows_are_those_that_were_written(tmp_path, name, content):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read_rows(tmp_path / name, FIELDS) == [A, B]
    assert read_rows(tmp_path, FIELDS) == [A, B]


@pytest.mark.parametrize("text", ["a\u2028b\x85c", 'He said "no",\nthen "yes".', "x" * 200_000, " a\tb ", "#### 1"])
@pytest.mark.parametrize("name", ["r.jsonl", "r.json", "r.csv", "r.tsv"])
def test_a_text_stays_as_it_is(tmp_path, name, text):
    quoted = text.replace('"', '""')
    separator = "\t" if name == "r.tsv" else ","
    line = json.dumps({"question": text, "answer": "1"}, ensure_ascii=False)
    content = line if "json" in name else f'question{separator}answer\n"{quoted}"{separator}1\n'
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert read_rows(tmp_path / name, FIELDS) == [{"question": text, "answer": "1"}]


REFUSED = [
    ("r.jsonl", LINES.encode("utf-16"), "begins with 0xfffe, as UTF-16 does"),
    ("r.csv", CSV.encode("utf-16-be"), r"byte 0xe9 at offset \d+ \(line 2\) is not UTF-8"),
    ("r.jsonl", LINES.encode("latin-1"), r"r\.jsonl: byte 0xe9 at offset 16 \(line 1\) is not UTF-8; iconv"),
    ("r.json", ARRAY.encode("latin-1"), r"byte 0xe9 at offset \d+ \(line 3\)"),
    ("r.csv", b"question,answer\nR?,1\nQ \xe9?,18\n", r"byte 0xe9 at offset 23 \(line 3\)"),
    ("r.jsonl", packed(LINES), "byte 0x8b at offset 1"),
    ("r.jsonl.gz", LINES.encode(), "gzip cannot read it"),
    ("r.jsonl.gz", packed(LINES * 99)[:50], "gzip cannot read it"),
    ("r.jsonl", LINES + '{"question": ', r"line 3: Expecting value"),
    ("r.jsonl", LINES.replace("}\n", "},\n"), "line 1: Extra data"),
    ("r.jsonl", LINES + "null\n", "line 3: 'None' .NoneType. is no object"),
    ("r.jsonl", LINES + "[1]\n", "line 3: .* is no object"),
    ("r.json", "[1, 2]", "row 1: '1' .int. is no object"),
    ("r.json", ARRAY[:-3], "line 1, where an array begins: "),
    ("r.jsonl", "[" * 100_000, "recursion"),
    ("r.jsonl", LINES + '{"question": "S?"}\n', r"line 3: no column 'answer' \(for 'answer'\); it has: question"),
    ("r.jsonl", '{"x": 1}\n' * 5, r"line 1: no column 'question'.*; it has: x \(and 4 more rows are refused\)"),
    ("r.csv", "question;answer\nQ?;18\n", "row 1: no column 'question'.*; it has: question;answer"),
    ("r.csv", 'question,answer\n"Q\n?",18\nR?\n', r"row 2 \(up to line 4\): 1 values, the header has 2 columns"),
    ("r.csv", "question,answer\nR?,1,2\n", r"row 1 .*: 3 values, the header has 2"),
    ("r.csv", "question,answer,answer\nR?,1,2\n", "two columns are named 'answer'"),
    ("r.csv", 'question,answer\n"R?,1\n', "line 2: unexpected end of data"),
    ("r.txt", LINES, "the name of a file with rows ends with .jsonl"),
    ("r.parquet.gz", LINES, "ends with .jsonl"),
    ("r.parquet", LINES, "r.parquet: Parquet cannot read it"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path, name, content, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as raised:
        read_rows(tmp_path / name, FIELDS)
    assert str(tmp_path / name) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["", "\n\n", "[]", "question,answer\n"])
def test_no_rows_are_no_data(tmp_path, content):
    path = tmp_path / ("r.csv" if "," in content else "r.json")
    path.write_text(content)
    with pytest.raises(ValueError, match="no rows are left to train on"):
        next(Dataset(path=str(path), fields=FIELDS).tasks(0, "train"))


NESTED = {"a": {"b": {"c": 1}}, "d.e": 2, "j": '{"k": {"l": 3}}', "n": None, "t": "text", "m": [{"x": 1}]}


@pytest.mark.parametrize(
    ("column", "value"),
    [("a.b.c", 1), ("a.b", {"c": 1}), ("d.e", 2), ("j.k.l", 3), ("j", NESTED["j"]), ("n", None)]
    + [(column, KeyError) for column in ("a.c", "n.x", "t.x", "m.0.x", "m.x", "d", "", "a.b.c.d")],
)
def test_columns_within_columns(tmp_path, column, value):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(NESTED))
    if value is KeyError:
        with pytest.raises(ValueError, match="no column"):
            read_rows(path, {"x": column})
    else:
        assert read_rows(path, {"x": column}) == [{"x": value}]


def test_values_of_parquet_are_those_that_were_written(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {
        "text": pyarrow.array(["Q?", None]).dictionary_encode(),
        "large": pyarrow.array(["Q?", "R?"], pyarrow.large_string()),
        "single": pyarrow.array([0.1, None], pyarrow.float32()),
        "half": pyarrow.array([0.1, 2.0], pyarrow.float16()),
        "singles": pyarrow.array([[0.1], []], pyarrow.list_(pyarrow.float32())),
        "struct": pyarrow.array([{"x": 0.1, "s": "a"}] * 2, pyarrow.struct({"x": pyarrow.float32(), "s": "string"})),
        "integer": pyarrow.array([2**62, 1]),
        "messages": [[{"role": "user", "content": "M?"}]] * 2,
        "image": [{"bytes": b"\x89"}] * 2,
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "r.parquet")
    names = ["text", "large", "single", "half", "singles", "struct.x", "struct", "integer", "messages"]
    read = read_rows(tmp_path / "r.parquet", {name: name for name in names})
    assert list(read[0].values()) == [
        "Q?", "Q?", 0.1, 0.1, [0.1], 0.1, {"x": 0.1, "s": "a"}, 2**62, [{"role": "user", "content": "M?"}]
    ]  # fmt: skip
    assert (read[1]["text"], read[1]["single"], read[1]["singles"]) == (None, None, [])
    with pytest.raises(ValueError, match=r"row 1: no column 'q' .*it has: .*image.*\(and 1 more rows"):
        read_rows(tmp_path / "r.parquet", {"question": "q"})


@pytest.mark.parametrize(
    ("value", "judge", "given"),
    [
        (Decimal("18.50"), "number", "18.50"),
        (float("nan"), "number", None),
        (float("inf"), "number", None),
        (datetime.date(2024, 1, 5), "exact", None),
        (b"18", "exact", None),
        (True, "exact", None),
        (None, "exact", None),
        (18.0, "number", 18.0),
        (18.0, "exact", None),
        (18, "exact", 18),
        ('["Paris", "paris"]', "word", ["Paris", "paris"]),
        ('["Paris", "paris"]', "exact", '["Paris", "paris"]'),
        ('["Paris", "paris"]', "number", None),
        ('["Paris", null]', "word", None),
        (["18", None], "number", None),
        ([[18]], "number", None),
        ({"value": 18}, "number", None),
    ],
)
def test_answers_of_other_types_are_used_or_refused(tmp_path, value, judge, given):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "r.parquet"
    parquet.write_table(pyarrow.table({"question": ["Q?"], "answer": [value]}), path)
    tasks = Questions(tokenizer=None, path=str(path), judge=judge).tasks
    if given is None:
        with pytest.raises(ValueError, match=r"r\.parquet row 1: column 'answer'"):
            next(tasks(0, "train"))
    else:
        assert next(tasks(0, "train")).data["answer"] == given


def test_what_is_trained_on_is_not_evaluated(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(LINES)
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    assert len(list(Dataset(path=a, fields=FIELDS, eval_path=b).tasks(0, "eval"))) == 2
    (tmp_path / "link.jsonl").symlink_to(a)
    for other in (a, str(tmp_path), f"{tmp_path}/./a.jsonl", str(tmp_path / "link.jsonl")):
        with pytest.raises(ValueError, match=r"eval_path .*a\.jsonl is trained on too"):
            next(Dataset(path=a, fields=FIELDS, eval_path=other).tasks(0, "eval"))


@pytest.mark.parametrize(
    "settings",
    [{"holdout": value} for value in ("1", 0.5, True, -1)] + [{"path": ""}, {"path": ["a"]}, {"fields": {"q": 3}}],
)
def test_settings_are_of_their_types(settings):
    with pytest.raises(ValueError, match="must be"):
        Dataset(**{"path": "x", "fields": FIELDS, **settings})


@pytest.mark.parametrize(("digits", "taken"), [(23, True), (400, True), (5000, False)])
def test_integers_may_be_long(tmp_path, digits, taken):
    (tmp_path / "r.jsonl").write_text(f'{{"question": "Q?", "answer": {"9" * digits}}}')
    tasks = Questions(tokenizer=None, path=str(tmp_path / "r.jsonl")).tasks
    if taken:
        assert next(tasks(0, "train")).data["answer"] == 10**digits - 1
    else:
        with pytest.raises(ValueError, match=r"r\.jsonl line 1: Exceeds the limit"):
            next(tasks(0, "train"))


MESSAGES = [{"role": "user", "content": "Q?"}]
LAYOUTS = {
    "GSM8K": (Questions, {}, {"question": "Q?", "answer": "It is so.\n#### 1,018"}, "Q?"),
    "MATH": (
        Questions,
        {"question": "problem", "answer": "solution", "judge": "math"},
        {"problem": "Q?", "level": "Level 2", "solution": "So \\boxed{\\frac12}."},
        "Q?",
    ),
    "TRL": (
        Questions,
        {"question": "prompt", "answer": "solution", "judge": "math"},
        {"prompt": MESSAGES, "solution": "$x^2$"},
        "Q?",
    ),
    "verl": (
        Questions,
        {"question": "prompt", "answer": "reward_model.ground_truth"},
        {"data_source": "d", "prompt": MESSAGES, "reward_model": {"style": "rule", "ground_truth": "18"}},
        "Q?",
    ),
    "SQuAD": (
        Questions,
        {"answer": "answers.text", "judge": "word", "prompt": "{context}\n{question}"},
        {"question": "Q?", "context": "C.", "answers": {"text": ["Paris", "paris"], "answer_start": [1, 1]}},
        "C.\nQ?",
    ),
    "MMLU": (
        Choice,
        {"prompt": "{subject}: {question}\n{choices}"},
        {"question": "Q?", "subject": "s", "choices": ["4", "2", "0", "1"], "answer": 1},
        "s: Q?\nA) 4\nB) 2\nC) 0\nD) 1",
    ),
    "ARC": (
        Choice,
        {"answer": "answerKey", "prompt": "{question}\n{choices}"},
        {"question": "Q?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
        "Q?\nA) x\nB) y",
    ),
    "MBPP": (
        Code,
        {"question": "text", "tests": "test_list", "prompt": "{question}\n{tests}"},
        {"text": "Q?", "code": "x", "test_list": ["assert f(1) == 2", "assert f(0)"], "test_setup_code": ""},
        "Q?\nassert f(1) == 2\nassert f(0)",
    ),
    "APPS": (
        Code,
        {"tests": "input_output", "prompt": "{question}"},
        {"question": "Q?", "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})},
        "Q?",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_layouts_of_others_are_used(tmp_path, name, suffix):
    made, args, row, prompt = LAYOUTS[name]
    path = tmp_path / f"r{suffix}"
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([row] * 2), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    environment = made(tokenizer=None, path=str(path), **args)
    assert environment.prompt(next(environment.tasks(0, "train")).data) == [{"role": "user", "content": prompt}]


def test_the_page_has_every_layout():
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    assert all(f"| {name}" in page for name in LAYOUTS)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("{question} Use \\boxed{}.", "Q {answer}? Use \\boxed{}."),
        ("{question} {0} {} }{ {x:3} {{level}}", "Q {answer}? {0} {} }{ {x:3} {3}"),
        ("{question} {level}", "Q {answer}? 3"),
        ("v{level}{question}", "v3Q {answer}?"),
        ("\\textbf{{question}} \\frac{level}{2} of {level}", "\\textbf{Q {answer}?} \\frac{level}{2} of 3"),
        ("{question} \\boxed{answer}", "Q {answer}? \\boxed{answer}"),
        ("{level} {topic}: {question}", "3 {question}: Q {answer}?"),
        ('{question} {"answer": 1}', 'Q {answer}? {"answer": 1}'),
    ],
)
def test_a_prompt_is_filled_from_the_row_alone(tmp_path, prompt, asked):
    assert contents(tmp_path, prompt=prompt) == [asked]
    assert contents(tmp_path, prompt=prompt, system="{level} \\boxed{}") == ["3 \\boxed{}", asked]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("Use \\boxed{}.", "does not contain {question}"),
        ("{qestion}", "does not contain {question}"),
        ("", "does not contain {question}"),
        ("{question} {answer}", "would tell the answer: {answer}"),
        ("{question} {none}", "column 'none' has None"),
        ("{question} {list}", "column 'list' has"),
    ],
)
def test_a_prompt_that_cannot_be_filled_is_refused(tmp_path, prompt, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        contents(tmp_path, prompt=prompt)


def contents(tmp_path, **settings) -> list[str]:
    """Of the messages that are asked."""
    row = {"question": "Q {answer}?", "answer": "1", "level": 3, "topic": "{question}", "none": None, "list": [1]}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(row))
    questions = Questions(tokenizer=None, path=str(path), **settings)
    return [message["content"] for message in questions.prompt(next(questions.tasks(0, "train")).data)]


def test_a_test_with_an_escape_that_python_warns_of_is_one(tmp_path):
    (tmp_path / "r.jsonl").write_text(json.dumps({"question": "Q?", "tests": ["assert f('\\d')"]}))
    next(Code(tokenizer=None, path=str(tmp_path / "r.jsonl")).tasks(0, "train"))


def test_json_in_a_string_that_is_nested_too_deeply_has_no_such_column():
    with pytest.raises(KeyError):
        value_at({"a": '{"b":' * 5000}, "a.b")


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.json.gz", "r.csv.gz"])
def test_a_packed_file_of_more_text_than_memory_holds_is_refused(tmp_path, monkeypatch, name):
    """Seven kilobytes of gzip are seven megabytes of text, as one line or as many."""
    text = {
        "r.jsonl.gz": '{"q": 1}\n' * 800_000,
        "r.json.gz": f'[{" " * 7_000_000}{{"q": 1}}]',
        "r.csv.gz": f'q\n"{"x" * 7_000_000}"\n',
    }
    (tmp_path / name).write_bytes(packed(text[name]))
    assert (tmp_path / name).stat().st_size < 40_000
    assert sum(1 for _ in rows_of(tmp_path / name, ["q"])) == (800_000 if name == "r.jsonl.gz" else 1)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 1024, "SC_PHYS_PAGES": 40_000}[name])
    with pytest.raises(ValueError, match=rf"{name}: its rows take 0\.0 GB or more, .* memory has 0\.0 GB"):
        list(rows_of(tmp_path / name, ["q"]))


def test_a_small_file_of_more_rows_than_memory_holds_is_refused(tmp_path, monkeypatch):
    """400 bytes of Parquet can name one long text as often as they like."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 20_000), pyarrow.array(["x" * 4096]))
    parquet.write_table(pyarrow.table({"q": column}), tmp_path / "r.parquet", compression="zstd")
    assert (tmp_path / "r.parquet").stat().st_size < 20_000
    assert sum(1 for _ in rows_of(tmp_path / "r.parquet", ["q"])) == 20_000
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 1024, "SC_PHYS_PAGES": 40_000}[name])
    with pytest.raises(ValueError, match=r"r.parquet: its rows take 0\.0 GB or more, .* memory has 0\.0 GB"):
        list(rows_of(tmp_path / "r.parquet", ["q"]))
