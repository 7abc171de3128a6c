"""Whatever the code that a config names raises before a run begins: one line with its place, and exit code 2."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from spmd_rl import config
from spmd_rl.envs.environment import checked_tasks, load
from spmd_rl.ranks.program import _environments, _prepare
from tests.says import write_folder

HEAD = """
from spmd_rl.types import Task
class Good:
    def __init__(self, *, tokenizer): pass
    def tasks(self, seed, split): yield from (Task(env="", task_id=str(i)) for i in range(9))
    async def rollout(self, task, generate): raise AssertionError
"""
INIT = "class Env(Good):\n    def __init__(self, *, tokenizer): "
TASKS = "class Env(Good):\n    def tasks(self, seed, split): "
ASYNC = "class Env(Good):\n    async def tasks"
CASES = {  # name: (source, what is said; its place is the line that ends in # here)
    "syntax": ("class Env:\n    def a(self:  # here\n", "SyntaxError: '(' was never closed"),
    "indent": ("class Env:\npass  # here\n", "IndentationError: expected an indented block"),
    "name": ("Env = undefined  # here", "NameError: name 'undefined' is not defined"),
    "import": ("import nowhere_to_be_found  # here", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
    "exit": ("import sys\nsys.exit('no licence')  # here", "SystemExit: no licence"),
    "base": ("raise BaseException('odd')  # here", "BaseException: odd"),
    "assert": (INIT + "assert False, 'never'  # here", "AssertionError: never"),
    "key": (INIT + "{}['a']  # here", "KeyError: 'a'"),
    "zero": (INIT + "1 / 0  # here", "ZeroDivisionError: division by zero"),
    "exit in init": (INIT + "raise SystemExit(3)  # here", "SystemExit: 3"),
    "value": (INIT + "raise ValueError('bad')  # here", "ValueError: bad"),
    "file": (INIT + "open('/nowhere')  # here", "FileNotFoundError: [Errno 2] No such file"),
    "library": (INIT + "__import__('json').loads('{')  # here", "JSONDecodeError: Expecting property name"),
    "lines": (INIT + "raise OSError('a\\n\\x1b[2Jb')  # here", "OSError: a \\x1b[2Jb"),
    "missing": ("", "AttributeError: module 'MODULE' has no attribute 'Env'"),
    "number": ("Env = 3", "3 (int) is no class"),
    "no rollout": ("class Env:\n    def __init__(self, tokenizer): self.tasks = print", "has no method rollout"),
    "nothing made": ("def Env(tokenizer): return None", "None (NoneType) has no method tasks"),
    "tasks raise": (TASKS + "raise KeyError('x')  # here", "KeyError: 'x'"),
    "tasks raise at first": (TASKS + "yield 1 / 0  # here", "ZeroDivisionError: division by zero"),
    "tasks stop": (TASKS + "yield next(iter(()))  # here", "RuntimeError: generator raised StopIteration"),
    "no tasks": (TASKS + "return None  # here", "tasks gave back None (NoneType)"),
    "async tasks": (ASYNC + "(self, seed, split):  # here\n        yield 1", "tasks gave back <async"),
    "empty": (TASKS + "return []", "has no tasks of the split 'train'"),
    "words": (TASKS + "return ['a']  # here", "'a' (str) is no Task"),
}  # fmt: skip


def module(folder, name: str, source: str) -> tuple[str, str]:
    """Its name, and the place that is to be told."""
    text = (HEAD if "Good" in source else "") + source
    stem = f"mine_{abs(hash((folder, name)))}"
    path = folder / f"{stem}.py"
    path.write_text(text)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]
    return stem, f"({path}:{lines[0]})" if lines else ""


@pytest.mark.parametrize("case", CASES)
def test_what_an_environment_raises_is_refused_in_a_line_with_its_place(case, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name, place = module(tmp_path, case, CASES[case][0])
    with pytest.raises(ValueError) as refused:
        next(checked_tasks("mine", load(f"{name}:Env", tokenizer=None, args={}), seed=0, split="train"))
    said = str(refused.value)
    assert said.startswith("environment ") and CASES[case][1].replace("MODULE", name) in said
    assert place in said and said.isprintable() and said.count(".py:") == bool(place)


def test_a_list_of_tasks_is_as_good_as_a_generator_and_a_function_as_a_class(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    listed = (
        TASKS + "return [Task(env='', task_id=i) for i in 'abc']\ndef make(tokenizer): return Env(tokenizer=tokenizer)"
    )
    name, _ = module(tmp_path, "list", listed)
    tasks = checked_tasks("mine", load(f"{name}:make", tokenizer=None, args={}), seed=0, split="train")
    assert [task.task_id for task in tasks] == ["a", "b", "c"]


def test_what_tasks_raise_later_is_told_with_its_place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name, place = module(tmp_path, "late", TASKS + "yield Task(env='', task_id='a'); raise KeyError('b')  # here")
    tasks = checked_tasks("mine", load(f"{name}:Env", tokenizer=None, args={}), seed=0, split="train")
    assert next(tasks).task_id == "a"
    with pytest.raises(ValueError, match="environment mine: its tasks: KeyError: 'b'") as refused:
        next(tasks)
    assert place in str(refused.value)


MAKES = {
    "raises": ("def make(path):\n    1 / 0  # here", "ZeroDivisionError: division by zero"),
    "nothing": ("def make(path): pass", "made no folder"),
    "missing": ("", "has no attribute 'make'"),
    "syntax": ("def make(path)  # here", "SyntaxError: expected ':'"),
    "number": ("make = 3", "TypeError: 'int' object is not callable"),
    "exits": ("def make(path): raise SystemExit(1)  # here", "SystemExit: 1"),
}


@pytest.mark.parametrize("case", MAKES)
def test_what_makes_the_model_is_refused_likewise(case, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name, place = module(tmp_path, case, MAKES[case][0])
    tree = {"model": {"path": str(tmp_path / "model"), "make": f"{name}:make"}}
    world = SimpleNamespace(engine_device=None)
    with pytest.raises(ValueError, match=r"^model\.make = ") as refused:
        _prepare(world, config.from_tree({**tree, "env": {"e": {"path": "spmd_rl.envs.echo:Echo"}}}), "name")
    assert MAKES[case][1] in str(refused.value) and place in str(refused.value)


def test_an_environment_that_another_node_cannot_build_is_refused_on_all_ranks(tmp_path):
    write_folder(tmp_path)
    settings = config.from_tree({"model": {"path": str(tmp_path)}, "env": {"e": {"path": "nowhere_at_all:Env"}}})
    topology, store = SimpleNamespace(engine_leaders=(1,)), HashStore()
    said: list[str] = []

    def start(rank: int) -> None:
        meeting = SimpleNamespace(rank=rank, world_size=2, host="ab"[rank], store=store)
        try:
            _environments(meeting, SimpleNamespace(rank=rank, topology=topology), settings)
        except ValueError as error:
            said.append(str(error))

    ranks = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    line = "rank 1 (b): environment nowhere_at_all:Env: ModuleNotFoundError: No module named 'nowhere_at_all'"
    assert said == [line, line]


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "said", "times"),
    [("[env.e]\npath = 'broken_env:Env'", "SyntaxError", 1), ("[rollout]\nbatch_siz = 3", "batch_siz", 3)],
)
def test_every_rank_of_a_torchrun_ends_with_2_and_the_line_is_said_once_a_start(what, said, times, tmp_path):
    """torchrun starts anew whatever fails; only what is refused before the ranks have met is refused again."""
    (tmp_path / "broken_env.py").write_text("class Env(:\n")
    root = Path(__file__).parents[2]
    (tmp_path / "c.toml").write_text(f"[model]\npath = '{tmp_path}/m'\nmake = 'spmd_rl.demo.tiny_model:make'\n{what}\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--max-restarts=2"]
    settings = ["topology.inference=2", "inference.max_seq_len=200", "rollout.max_tokens=20", f"run.dir={tmp_path}/run"]
    command = [*torchrun, "-m", "spmd_rl", str(tmp_path / "c.toml"), *settings]
    env = os.environ | {"PYTHONPATH": f"{root}:{tmp_path}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=env)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(lines) == times and all(said in line for line in lines)
    codes = [line.split(":")[1].split()[0] for line in done.stderr.splitlines() if "exitcode  :" in line]
    assert set(codes) == {"2"}
