"""Ranks that differ in anything that changes numbers are refused by its name; what may differ between nodes is not."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import spmd_rl
from spmd_rl import config
from spmd_rl.config import Config
from spmd_rl.demo import tiny_model
from spmd_rl.distributed import world
from spmd_rl.distributed.agreement import NoAnswer, Said, agree, difference
from spmd_rl.ranks import rank_facts
from spmd_rl.ranks.rank_facts import compare_files, compare_programs, of_files, of_program, who_reads

TREE = {"model": {"path": "m"}, "topology": {"inference": 2}, "env": {"e": {"path": "spmd_rl.envs.fraction:Fraction"}}}


@dataclass
class Rank:
    """A rank in a thread."""

    rank: int
    world_size: int
    store: dist.Store

    @property
    def host(self) -> str:
        return f"node{self.rank}"


def on_ranks(call: Callable[[Rank], object], num_ranks: int = 3) -> list[object]:
    """What `call` returned on each rank, or the text of what it raised."""
    store, ended = dist.HashStore(), [None] * num_ranks

    def live(rank: int) -> None:
        try:
            ended[rank] = call(Rank(rank, num_ranks, store))
        except (ValueError, TimeoutError) as error:
            ended[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def said(rank: int, value: object = None) -> Said:
    return Said(rank=rank, host=f"node{rank}", value=value)


def load(**changes: object) -> Config:
    tree = json.loads(json.dumps(TREE))
    for key, value in changes.items():
        *path, last = key.split("__")
        table = tree
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return config.from_tree(tree)


# ---- what a rank was started with


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"trainer__learning_rate": 0.1},
            "setting trainer.learning_rate differs between ranks: 1e-06 on rank 0 (node0), ",
        ),
        ({"topology__inference": 1, "topology__trainer": 2}, "setting topology.inference differs between ranks: 2 on "),
        (
            {"run__dir": "other"},
            'setting run.dir differs between ranks: "" on rank 0 (node0), "other" on rank 2 (node2)',
        ),
        ({"env__e__weight": 2.0}, "setting env.e.weight differs between ranks: 1.0 on rank 0 (node0), 2.0 on rank 2"),
        (
            {"env__e__args__n": 3},
            "setting env.e.args differs between ranks:  on rank 0 (node0), env.e.args.n on rank 2",
        ),
        (
            {"env__f": {"path": "a:B"}},
            'setting env.f.path differs between ranks: none on rank 0 (node0), "a:B" on rank 2',
        ),
        ({"model__template": {"enable_thinking": False}}, "setting model.template differs between ranks: {} on rank 0"),
        (
            {"trainer__betas": [0.9, 0.99]},
            "setting trainer.betas differs between ranks: [0.9, 0.95] on rank 0 (node0), ",
        ),
        ({"model__path": "/local/of/this/node"}, ""),
    ],
)
def test_a_setting_that_differs_is_named_on_every_rank(changes, line):
    ended = on_ranks(lambda rank: compare_programs(rank, load(**changes) if rank.rank == 2 else load()))
    assert ended[0] == ended[1] == ended[2]
    assert str(ended[0]).startswith(f"ValueError: {line}") if line else ended[0] is None


@pytest.mark.parametrize(
    ("variable", "compared"),
    [
        *[(name, True) for name in ("NVIDIA_TF32_OVERRIDE", "VLLM_ATTENTION_BACKEND", "CUBLAS_WORKSPACE_CONFIG")],
        *[
            (name, True)
            for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "PYTHONHASHSEED")
        ],
        *[
            (name, False)
            for name in ("OMP_NUM_THREADS", "TORCH_NCCL_DUMP_ON_TIMEOUT", "VLLM_HOST_IP", "TRITON_CACHE_DIR")
        ],
        *[(name, False) for name in ("PYTORCH_CUDA_ALLOC_CONF", "RANK", "MASTER_ADDR", "SPMD_RL_NOTES", "HOME")],
    ],
)
def test_variables_that_change_numbers_are_compared_and_no_others(monkeypatch, variable, compared):
    monkeypatch.delenv(variable, raising=False)
    here = of_program(load(), plays=True)
    monkeypatch.setenv(variable, "7")
    line = difference([(said(0), here), (said(1), of_program(load(), plays=False))])
    named = f"environment variable {variable} differs between ranks: none on rank 0 (node0), 7 on rank 1 (node1)"
    assert line == (named if compared else "")


@pytest.mark.parametrize(
    ("package", "plays", "compared"),
    [
        ("torch", False, True),
        ("tokenizers", False, True),
        ("spmd_rl", False, True),
        ("vllm", True, True),
        ("vllm", False, False),
    ],
)
def test_versions_are_compared_where_they_are_used(monkeypatch, package, plays, compared):
    here = of_program(load(), plays=True)
    installed = rank_facts.importlib.metadata.version
    monkeypatch.setattr(
        rank_facts.importlib.metadata, "version", lambda name: "9.9" if name == package else installed(name)
    )
    line = difference([(said(0), here), (said(1), of_program(load(), plays=plays))])
    assert line.startswith(f"version of {package} differs between ranks: ") == compared
    assert line.endswith(", 9.9 on rank 1 (node1)") == compared


def test_another_checkout_of_this_package_is_named_by_its_file(monkeypatch, tmp_path):
    here = of_program(load(), plays=True)
    other = shutil.copytree(Path(spmd_rl.__file__).parent, tmp_path / "spmd_rl")
    monkeypatch.setattr(spmd_rl, "__file__", str(other / "__init__.py"))
    assert difference([(said(0), here), (said(1), of_program(load(), plays=True))]) == ""
    (other / "envs" / "fraction.py").write_text("# another one")
    (other / "envs" / "more.py").write_text("")
    line = difference([(said(0), here), (said(1), of_program(load(), plays=True))])
    assert line.startswith("code spmd_rl/envs/fraction.py differs between ranks: ")
    assert line.endswith("; 1 more, such as code spmd_rl/envs/more.py")


def test_a_rank_that_has_no_config_is_refused_with_its_reason_on_all():
    ended = on_ranks(
        lambda rank: compare_programs(rank, ValueError("c.toml: no such file") if rank.rank == 1 else load())
    )
    assert ended == ["ValueError: rank 1 (node1): c.toml: no such file"] * 3


def test_a_rank_that_says_nothing_is_named():
    def call(rank: Rank) -> object:
        return None if rank.rank == 1 else agree(rank, "word", lambda: 0, lambda said: 0, timeout_s=0.2)

    ended = on_ranks(call)
    assert ended == ["TimeoutError: start: no word about word from rank 1 within 0 s", None, ended[0]]


def test_a_rank_that_rank_0_leaves_without_an_answer_says_what_was_lost(monkeypatch):
    monkeypatch.setattr("spmd_rl.distributed.agreement._REPLY_S", 0.1)
    with pytest.raises(NoAnswer, match="rank 0 decided nothing about word within 0 s"):
        agree(Rank(1, 2, dist.HashStore()), "word", lambda: 0, lambda said: 0, timeout_s=0.0)
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, 2, is_master=False, wait_for_workers=False)
    held = [server]

    def lose() -> int:
        held.clear()
        return 0

    del server
    with pytest.raises(NoAnswer, match="the job's store, on rank 0's host, was lost before word was decided"):
        agree(Rank(1, 2, store), "word", lose, lambda said: 0, timeout_s=60.0)


def test_a_refusal_is_said_once_and_noted_and_ends_all_ranks_with_its_code(monkeypatch, capfd):
    job, ended = dist.HashStore(), []
    monkeypatch.setattr(world, "end_process", ended.append)
    monkeypatch.setattr(world.signal, "signal", lambda *args: None)  # these ranks are threads

    def call(rank: Rank) -> object:
        meeting = world.Meeting(
            rank=rank.rank,
            world_size=rank.world_size,
            host=rank.host,
            generation=1,
            restarted=False,
            job=job,
            store=rank.store,
            timeout_s=20.0,
        )
        try:
            return compare_programs(meeting, load(run__seed=rank.rank // 2))
        except ValueError as error:
            return world.leave_refused(meeting, error, 2)

    assert on_ranks(call) == [None] * 3
    assert ended == [2, 2, 2] and job.get("ended") == b"2"
    assert capfd.readouterr().err == (
        "error: setting run.seed differs between ranks: 0 on rank 0 (node0), 1 on rank 2 (node2): all ranks must have "
        "the same\n"
    )


def test_rank_0_decides_once_for_all():
    decided = []

    def decide(said: list[Said]) -> int:
        decided.append([one.value for one in said])
        return sum(one.value for one in said)

    assert on_ranks(lambda rank: agree(rank, "sum", lambda: 10**rank.rank, decide, timeout_s=20.0)) == [111] * 3
    assert decided == [[1, 10, 100]]


def test_long_values_are_shown_where_they_part():
    here, there = "x" * 500 + "1" + "y" * 500, "x" * 500 + "2" + "y" * 500
    facts = [replace(of_program(load(), plays=True), of_all={"it": value}, of_some={}) for value in (here, there)]
    line = difference([(said(rank), one) for rank, one in enumerate(facts)])
    assert "x1y" in line and "x2y" in line and len(line) < 450


# ---- what a rank reads


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rank_facts") / "tiny"
    tiny_model.make(folder)
    (folder / "README.md").write_text("here")
    return folder


def run(folders: list[Path], args: list[dict[str, object]]) -> list[object]:
    """Ranks 0 and 1 infer, 2 trains, each with a model folder and arguments of its environment."""

    def call(rank: Rank) -> object:
        loaded = load(model__path=str(folders[rank.rank]), env__e__args=args[rank.rank])
        role = "trainer" if rank.rank == 2 else "inference"
        devices = {"trainer" if rank.rank == 2 else "engine": "cpu"}
        return compare_files(rank, loaded, role=role, devices=devices, timeout_s=60.0)

    ended = on_ranks(call)
    assert ended[0] == ended[1] == ended[2] or isinstance(ended[0], list)
    return ended


def edit(file: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | values))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


def in_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for file, inside in (("a.safetensors", names[:5]), ("b.safetensors", names[5:])):
        save_file({name: tensors[name] for name in inside}, folder / file, {"format": "pt"})
    where = {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


NORM = "model.norm.weight"
MODELS = {  # name → rank whose copy is changed, change, beginning of what is said
    "config": (
        1,
        edit("config.json", rms_norm_eps=1e-3),
        "rms_norm_eps of config.json in model.path differs between ranks: ",
    ),
    "a key more": (
        2,
        edit("config.json", use_sliding_window=True),
        "use_sliding_window of config.json in model.path dif",
    ),
    "generation": (
        1,
        edit("generation_config.json", eos_token_id=7),
        "eos_token_id of generation_config.json in model.p",
    ),
    "tokenizer": (1, edit("tokenizer.json", version="2.0"), "tokenizer.json in model.path differs between ranks: "),
    "specials": (
        2,
        edit("special_tokens_map.json", pad_token="?"),
        "special_tokens_map.json in model.path differs between",
    ),
    "template": (
        1,
        lambda f: (f / "chat_template.jinja").write_text("{{ x }}"),
        "chat_template.jinja in model.path differs",
    ),
    "one value": (
        2,
        weights(lambda t: t[NORM].view(-1)[3].add_(1.0)),
        f"tensor {NORM} in model.path differs between ranks",
    ),
    "type": (
        2,
        weights(lambda t: t.update({NORM: t[NORM].double()})),
        f"tensor {NORM} in model.path differs between ranks",
    ),
    "a tensor less": (2, weights(lambda t: t.pop(NORM)), f"tensor {NORM} in model.path differs between ranks: "),
    "not finite": (2, weights(lambda t: t[NORM].fill_(float("nan"))), "rank 2 (node2): "),
    "no weights": (2, lambda f: (f / "model.safetensors").unlink(), "rank 2 (node2): "),
    "no folder": (1, lambda f: shutil.rmtree(f), "rank 1 (node1): model.path = "),
    "weights that are not loaded": (1, weights(lambda t: t[NORM].fill_(2.0)), ""),
    "shards": (2, in_shards, ""),
    "readme": (1, lambda f: (f / "README.md").write_text("there"), ""),
    "who wrote it": (2, edit("config.json", transformers_version="1"), ""),
}


@pytest.mark.parametrize("case", MODELS)
def test_model_folders_are_compared_by_content(tiny, tmp_path, case):
    changed, change, line = MODELS[case]
    folders = [shutil.copytree(tiny, tmp_path / str(rank)) for rank in range(3)]
    change(folders[changed])
    ended = run(folders, [{}, {}, {}])
    assert str(ended[0]).startswith(f"ValueError: {line}") if line else isinstance(ended[0], list)


def write(folder: Path, **files: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.jsonl").write_text(text)
    return str(folder)


DATA = {  # name → [ranks] the argument, beginning of what is said
    "one file": (lambda p: [write(p, a="1") + "/a.jsonl"] * 3, ""),
    "copies": (lambda p: [write(p / str(rank), **{f"a{rank}": "1"}) + f"/a{rank}.jsonl" for rank in range(3)], ""),
    "other rows": (
        lambda p: [write(p / str(rank), a=str(rank == 1)) + "/a.jsonl" for rank in range(3)],
        "content of what setting env.e.args.path names differs between ranks: ",
    ),
    "other rows on a trainer": (
        lambda p: [write(p / str(rank), a=str(rank == 2)) + "/a.jsonl" for rank in range(3)],
        "content of what setting env.e.args.path names differs between ranks: ",
    ),
    "another file that is missing": (
        lambda p: [write(p, a="1") + "/a.jsonl"] * 2 + [str(p / "none.jsonl")],
        "setting env.e.args.path differs between ranks: ",
    ),
    "missing on rank 0": (
        lambda p: [str(p / "none.jsonl"), str(p / "none.jsonl"), write(p, a="1") + "/a.jsonl"],
        "what setting env.e.args.path names differs between ranks: no file or folder on rank 0 (node0), a",
    ),
    "folders": (lambda p: [write(p / str(rank), a="1", b="2") for rank in range(3)], ""),
    "other rows in a folder": (
        lambda p: [write(p / str(rank), a="1", b=str(rank == 1)) for rank in range(3)],
        "content of b.jsonl in what setting env.e.args.path names differs between ranks: ",
    ),
    "a file more": (
        lambda p: [write(p / str(rank), a="1", **({"b": ""} if rank == 1 else {})) for rank in range(3)],
        "what setting env.e.args.path names differs between ranks: a folder of 1 files: a.jsonl on rank 0",
    ),
    "text": (
        lambda p: ["x", "x", "y"],
        'setting env.e.args.path differs between ranks: "x" on rank 0 (node0), "y" on rank 2',
    ),
    "empty text": (lambda p: ["", "", ""], ""),
    "long text": (lambda p: ["x" * 5000] * 3, ""),
}


@pytest.mark.parametrize("case", DATA)
def test_files_that_arguments_name_are_compared_by_content(tiny, tmp_path, case):
    make, line = DATA[case]
    ended = run([tiny] * 3, [{"path": path} for path in make(tmp_path / "data")])
    assert str(ended[0]).startswith(f"ValueError: {line}") if line else isinstance(ended[0], list)


@pytest.mark.parametrize("plays", [False, True])
def test_a_file_may_be_missing_where_no_episodes_run(tiny, tmp_path, plays):
    file = Path(write(tmp_path, a="1")) / "a.jsonl"
    loaded = load(model__path=str(tiny), env__e__args={"path": str(file)})
    here = of_files(loaded, leads=True, plays=True, devices={})
    file.unlink()
    line = difference([(said(0), here), (said(1), of_files(loaded, leads=False, plays=plays, devices={}))])
    named = "what setting env.e.args.path names differs between ranks: a file on rank 0 (node0), no file or folder on"
    assert line == (f"{named} rank 1 (node1)" if plays else "")


def test_paths_are_found_at_any_depth_and_others_are_not_followed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_facts, "MOST_FILES", 3)
    many, few = write(tmp_path / "many", a="", b="", c="", d=""), write(tmp_path / "few", a="1")
    args = {"deep": {"paths": [f"{few}/a.jsonl", many, 7, True]}, "word": "few"}
    found = rank_facts.sources(load(model__path=str(tiny), env__e__args=args), loads=False)
    assert [one.name for one in found] == ["content of what setting env.e.args.deep.paths[0] names"]
    lines = run([tiny] * 3, [args] * 3)[0]
    assert lines[1].startswith("warning: env.e.args.deep.paths[1] = ") and "more than 3 files" in lines[1]


def test_users_code_is_compared_with_what_it_imports(tiny, tmp_path, monkeypatch):
    (tmp_path / "my_reward_of_ranks.py").write_text("def reward(): return 1.0\n")
    (tmp_path / "my_env_of_ranks.py").write_text("import my_reward_of_ranks\nclass Env: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load(model__path=str(tiny), env__e__path="my_env_of_ranks:Env")
    here = of_files(loaded, leads=True, plays=True, devices={})
    assert {"code of module my_reward_of_ranks", "code of module my_env_of_ranks"} <= here.of_some.keys()
    assert not any("torch" in name or "spmd_rl." in name for name in here.of_some)
    (tmp_path / "my_reward_of_ranks.py").write_text("def reward(): return 2.0\n")
    there = of_files(loaded, leads=False, plays=True, devices={})
    assert difference([(said(0), here), (said(1), there)]).startswith(
        "code of module my_reward_of_ranks differs between"
    )
    assert not any("code" in name for name in of_files(loaded, leads=False, plays=False, devices={}).of_some)


def test_code_that_one_rank_cannot_import_is_named(tiny):
    loaded = load(model__path=str(tiny), env__e__path="no_such_module:Env")
    with pytest.raises(ValueError, match="environment no_such_module:Env: ModuleNotFoundError: No module named"):
        of_files(loaded, leads=False, plays=True, devices={})


def test_trainers_without_a_device_beside_others_are_named(tiny):
    facts = [
        of_files(load(model__path=str(tiny)), leads=False, plays=False, devices={"trainer": d}) for d in ("cuda", "cpu")
    ]
    line = difference([(said(rank + 1), one) for rank, one in enumerate(facts)])
    assert line == "device of the trainer ranks differs between ranks: cuda on rank 1 (node1), cpu on rank 2 (node2)"


def test_each_file_is_read_by_one_rank(tiny, tmp_path):
    link, copy = tmp_path / "link", shutil.copytree(tiny, tmp_path / "copy")
    link.symlink_to(tiny)
    seen = [
        [one.seen_as() for one in rank_facts.sources(load(model__path=str(folder)), loads=True)]
        for folder in (tiny, link, copy, tiny, copy)
    ]
    assert who_reads(seen) == [[0], [], [0], [], []]
    assert who_reads([[[1], [2]], [[2], [3], [3]], [[1]]]) == [[0, 1], [2], []]
