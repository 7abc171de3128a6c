import json
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from spmd_rl.envs.dataset import Dataset, read_rows
from spmd_rl.orchestrator.difficulty import Difficulty
from spmd_rl.orchestrator.task_stream import TaskStream
from spmd_rl.types import Task
from tests import fakes

GSM8K = [{"question": f"How many is {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(10)]
FIELDS = {"question": "question", "answer": "answer"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def rows(tmp_path):
    return str(write(tmp_path / "train.jsonl", GSM8K))


def ids(tasks):
    return [task.task_id for task in tasks]


def test_an_epoch_is_every_row_once_in_an_order_that_the_seed_decides(rows):
    data = Dataset(path=rows, fields=FIELDS)
    first = ids(islice(data.tasks(0, "train"), 20))
    assert sorted(first[:10]) == sorted(first[10:]) == sorted(map(str, range(10)))
    assert first[:10] != first[10:]
    assert first == ids(islice(Dataset(path=rows, fields=FIELDS).tasks(0, "train"), 20))
    assert first != ids(islice(data.tasks(1, "train"), 20))
    task = next(data.tasks(0, "train"))
    assert task.data == GSM8K[int(task.task_id)]


def test_data_ends_after_its_epochs(rows):
    assert len(list(Dataset(path=rows, fields=FIELDS, max_epochs=3).tasks(0, "train"))) == 30


def test_rows_held_out_are_evaluated_and_not_trained_on(rows):
    data = Dataset(path=rows, fields=FIELDS, holdout=3, max_epochs=1)
    assert ids(data.tasks(5, "eval")) == ["7", "8", "9"]
    assert sorted(ids(data.tasks(5, "train"))) == list("0123456")


def test_a_file_of_its_own_for_evaluation_is_read_in_order(rows, tmp_path):
    other = write(tmp_path / "test.jsonl", GSM8K[:4])
    data = Dataset(path=rows, fields=FIELDS, eval_path=str(other))
    assert ids(data.tasks(0, "eval")) == ["eval 0", "eval 1", "eval 2", "eval 3"]


def test_a_folder_is_all_of_its_files_and_columns_are_mapped(tmp_path):
    write(tmp_path / "b.jsonl", [{"problem": "2", "extra": {"solution": "two"}}])
    write(tmp_path / "a.jsonl", [{"problem": "1", "extra": {"solution": "one"}}])
    (tmp_path / "README.md").write_text("not data")
    fields = {"question": "problem", "answer": "extra.solution"}
    assert read_rows(tmp_path, fields) == [{"question": "1", "answer": "one"}, {"question": "2", "answer": "two"}]


def test_parquet_reads_as_jsonl_does(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(GSM8K), tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet", FIELDS) == GSM8K


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fields": {"question": "q"}},
            r"train\.jsonl line 1: no column 'q' \(for 'question'\); it has: question",
        ),
        ({"path": "/nowhere.jsonl"}, r"/nowhere\.jsonl: no such file"),
        ({"holdout": 10}, "no rows are left to train on, holdout = 10"),
    ],
)
def test_what_is_wrong_with_the_data_is_said(rows, settings, message):
    with pytest.raises(ValueError, match=message):
        next(Dataset(**{"path": rows, "fields": FIELDS, **settings}).tasks(0, "train"))


def test_a_broken_line_and_a_missing_evaluation_are_said(rows, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"question": 1}\n{"quest')
    with pytest.raises(ValueError, match=r"broken\.jsonl line 2: Unterminated"):
        read_rows(tmp_path / "broken.jsonl", {"question": "question"})
    with pytest.raises(ValueError, match=r"give eval_path or holdout to evaluate, or set eval\.every = -1"):
        next(Dataset(path=rows, fields=FIELDS).tasks(0, "eval"))
    with pytest.raises(ValueError, match="leaves nothing to hold out"):
        Dataset(path=rows, fields=FIELDS, eval_path="x", holdout=1)


def stream(rows, *, seed=0, keep=None):
    once = Dataset(path=rows, fields=FIELDS, max_epochs=2)
    return TaskStream(
        {"once": lambda: once.tasks(seed, "train"), "more": lambda: fakes.tasks(60)},
        weights={"once": 1.0, "more": 3.0},
        seed=seed,
        keep=keep,
    )


def test_sources_are_mixed_by_weight_and_go_on_when_one_has_ended(rows):
    tasks = list(stream(rows))
    assert Counter(task.env for task in tasks) == {"once": 20, "more": 60}
    shares = Counter(task.env for task in tasks[:40])
    assert 5 <= shares["once"] <= 16


def test_tasks_come_as_json_brings_them_and_what_is_none_is_named():
    def source():
        yield Task(env="", task_id="a", data={"pair": (1, 2), "names": {3: "three"}})
        yield Task(env="", task_id="b", data={"n": np.int64(4)})

    tasks = TaskStream({"sums": source}, weights={"sums": 1.0}, seed=0)
    assert next(tasks) == Task(env="sums", task_id="a", data={"pair": [1, 2], "names": {"3": "three"}})
    with pytest.raises(ValueError, match=r"environment sums, task 'b': data\['n'\] is not JSON.*type int64 is not"):
        next(tasks)


def go_on(there: TaskStream, *args, **kwargs) -> TaskStream:
    """As a resume does: the state travels as JSON."""
    again = stream(*args, **kwargs)
    again.restore(json.loads(json.dumps(there.state())))
    return again


def test_a_stream_restored_goes_on_exactly(rows):
    def keep(task: Task, draw: int) -> bool:
        return (len(task.task_id) + draw) % 3 != 0

    whole = stream(rows, keep=keep)
    taken = [next(whole) for _ in range(17)]
    again = go_on(whole, rows, keep=keep)
    assert again.state() == whole.state()
    again.restore(whole.state())  # twice is as once
    assert list(again) == list(whole)
    assert whole.cursor == 80 and len(taken) < 80


def edited(row, **values):
    return [*GSM8K[:row], GSM8K[row] | values, *GSM8K[row + 1 :]]


OTHERS = "env.once: the 7 tasks that were drawn are others now, by content"
DRAWN = [8, 5]  # of the seven that are drawn below
UNDRAWN = 9


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"rows": edited(DRAWN[0], answer="#### 99")}, OTHERS),
        ({"rows": edited(DRAWN[1], question="?")}, OTHERS),
        ({"rows": GSM8K[::-1]}, OTHERS),
        ({"rows": [{"question": "new", "answer": "1"}, *GSM8K]}, OTHERS),  # rows are put before the others
        ({"rows": GSM8K[:9]}, "env.once: 9 rows to train on, there were 10 when the epoch under way began"),
        ({"rows": GSM8K, "seed": 7}, OTHERS),
        ({"rows": GSM8K, "holdout": 2}, "env.once: holdout = 2, it was 0: rows would change sides"),
        ({"rows": GSM8K, "fields": {"question": "answer", "answer": "question"}}, OTHERS),
        ({"rows": edited(UNDRAWN, answer="#### 99")}, None),
        ({"rows": [*GSM8K, {"question": "new", "answer": "1"}]}, None),
        ({"rows": GSM8K, "max_epochs": 5}, None),
    ],
    ids=range(11),
)
def test_rows_that_were_drawn_are_known_by_content(tmp_path, now, message):
    def made(rows, seed=0, fields=FIELDS, **settings):
        data = Dataset(path=str(write(tmp_path / "rows.jsonl", rows)), fields=fields, **settings)
        return TaskStream({"once": lambda: data.tasks(seed, "train")}, weights={"once": 1.0}, seed=seed)

    before = made(GSM8K)
    drawn = ids(islice(before, 7))
    assert str(UNDRAWN) not in drawn and {str(row) for row in DRAWN} < set(drawn)
    again = made(**now)
    if message:
        with pytest.raises(ValueError, match=message):
            again.restore(before.state())
    else:
        again.restore(before.state())
        assert sorted(drawn + ids(islice(again, 3))) == list("0123456789")


def test_an_epoch_that_has_begun_is_not_taken_back(rows):
    before = Dataset(path=rows, fields=FIELDS).tasks(0, "train")
    list(islice(before, 11))
    with pytest.raises(ValueError, match="max_epochs = 1, and epoch 2 has begun"):
        Dataset(path=rows, fields=FIELDS, max_epochs=1).tasks(0, "train").restore(before.state())


@pytest.mark.parametrize("plan", range(30))
def test_every_row_is_drawn_once_an_epoch_whatever_is_appended_and_however_often_it_resumes(tmp_path, plan):
    """Two files that grow, epochs that are added, an endless source beside them; the sizes are counted here."""
    rng = random.Random(plan)
    sizes, epochs = {"a": rng.randint(1, 9), "b": rng.randint(1, 9)}, {"a": rng.randint(1, 3), "b": 0}
    weights = {"a": rng.uniform(0.1, 5.0), "b": rng.uniform(0.1, 5.0), "c": 1.0}
    drawn: dict[str, list[str]] = {name: [] for name in weights}
    wanted: dict[str, list[int]] = {"a": [], "b": []}  # rows of each epoch that has begun
    state, keep = None, lambda task, draw: (int(task.task_id) + draw) % 5 > 0

    def made() -> TaskStream:
        sources = {"c": lambda: fakes.tasks(1000)}
        for name, num in sizes.items():
            path = write(tmp_path / f"{name}.jsonl", [{"n": [name, row]} for row in range(num)])
            data = Dataset(path=str(path), fields={"n": "n"}, max_epochs=epochs[name])
            sources[name] = lambda data=data: data.tasks(plan, "train")
        return TaskStream(sources, weights=weights, seed=plan, keep=lambda task, draw: see(task) or keep(task, draw))

    def see(task: Task) -> None:
        mine = drawn[task.env]
        if task.env in sizes and len(mine) == sum(wanted[task.env]):
            wanted[task.env].append(sizes[task.env])  # an epoch has as many rows as there are when it begins
        mine.append(task.task_id)

    for _ in range(rng.randint(2, 6)):
        tasks = made()
        if state is not None:
            tasks.restore(state)
        list(islice(tasks, rng.randint(0, 30)))
        state = json.loads(json.dumps(tasks.state()))
        for name in sizes:
            sizes[name] += rng.choice([0, 0, 1, 5])
        epochs["a"] += rng.choice([0, 1])
    for name, each in wanted.items():
        left = iter(drawn[name])
        for num in each[:-1]:
            assert sorted(islice(left, num), key=int) == [str(row) for row in range(num)]
        last = list(left)
        assert len(set(last)) == len(last) and all(int(row) < each[-1] for row in last)
    assert drawn["c"] == [task.task_id for task in islice(fakes.tasks(1000), len(drawn["c"]))]


def test_an_environment_that_had_ended_changes_nothing_for_the_others():
    """Ended and found to have ended are the same: a resume finds it out again."""

    def made():
        sources = {name: lambda num=num: fakes.tasks(num) for name, num in (("a", 3), ("b", 50), ("c", 50))}
        return TaskStream(sources, weights={"a": 3.0, "b": 1.0, "c": 2.0}, seed=0)

    whole = [task.env for task in made()]
    assert Counter(whole) == {"a": 3, "b": 50, "c": 50}
    for cut in (4, 10, 60):
        first, second = made(), made()
        taken = [task.env for task in islice(first, cut)]
        second.restore(first.state())
        assert taken + [task.env for task in second] == whole


def difficulty(**settings):
    return Difficulty(**{"least": 0.2, "most": 0.8, "revisit": 0.1, "solved_at": 1.0, "seed": 0, **settings})


def group(number, rewards):
    return fakes.group(fakes.work(number, size=len(rewards)), rewards).rollouts


def test_solved_and_hopeless_tasks_are_mostly_passed_over():
    known = difficulty()
    for number, rewards in enumerate([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]):
        known.observe(group(number, rewards))
    kept = [sum(known.keep(Task(env="fake", task_id=str(n)), draw) for draw in range(1000)) for n in range(4)]
    assert kept[2:] == [1000, 1000]  # the middling and the unknown one
    assert all(60 < k < 140 for k in kept[:2])
    assert known.summary() == {"known": 3, "solved": 1 / 3, "hopeless": 1 / 3}


def test_a_task_comes_back_when_its_rate_does():
    known, task = difficulty(revisit=0.0), Task(env="fake", task_id="0")
    known.observe(group(0, [0, 0]))
    assert not known.keep(task, 0)
    known.observe(group(0, [1, 0]))
    assert known.keep(task, 0)


def test_failed_members_are_not_measured():
    known = difficulty()
    work = fakes.work(0, size=2)
    known.observe([fakes.rollout(work, i, failed=True) for i in range(2)])
    assert known.summary()["known"] == 0


def test_difficulties_survive_a_checkpoint():
    known, restored = difficulty(), difficulty()
    for number in range(5):
        known.observe(group(number, [number % 2, 1]))
    restored.restore(json.loads(json.dumps(known.state())))
    assert restored.state() == known.state()
