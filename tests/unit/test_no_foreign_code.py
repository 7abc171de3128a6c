"""Nothing that comes from a file or a peer is run, and nothing waits for connections from other hosts."""

import ast
from pathlib import Path

import pytest

from spmd_rl.model.causal_lm import load_config

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "spmd_rl").rglob("*.py"), *(ROOT / "launch").glob("*.py")])
PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
RESTRICTED = {"checkpoint.py": {"Unpickler", "UnpicklingError"}}  # for a reader with a list of words
RUNS = {"eval", "exec", "compile", "__import__"}
SANDBOXED = {"judged_program.py": {"exec", "compile"}}  # a program of its own, which the sandbox alone starts
FLAGS = {"allow_pickle", "trust_remote_code", "shell"}
LISTENS = {"start_server": 1, "create_server": 1}  # which argument is the host


def offences(code: str, file: str = "any.py") -> list[str]:
    """What a file does that may run foreign code or lets other hosts in, with its line."""
    found = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=names):
                modules = {name.name.partition(".")[0] for name in names}
                found += [(node, m) for m in modules & PICKLES if m != "pickle" or file not in RESTRICTED]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in PICKLES:
                found.append((node, module))
            case ast.Attribute(value=ast.Name(id="pickle"), attr=attr) if attr not in RESTRICTED.get(file, ()):
                found.append((node, f"pickle.{attr}"))
            case ast.Attribute(attr=attr) if attr.endswith(("_object", "_object_list")):  # torch pickles those
                found.append((node, attr))
            case ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen"):
                found.append((node, node.attr))
            case ast.Call(func=ast.Name(id=name)) if name in RUNS - SANDBOXED.get(file, set()):
                found.append((node, name))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                if "weights_only=True" not in [ast.unparse(word) for word in node.keywords]:
                    found.append((node, "torch.load"))
            case ast.Call(func=ast.Attribute(attr=name)) if name in LISTENS:
                if ast.unparse(node.args[LISTENS[name]]) != "'127.0.0.1'":
                    found.append((node, name))
            case ast.keyword(arg=name, value=value) if name in FLAGS and ast.unparse(value) != "False":
                found.append((node.value, name))
    return [f"line {node.lineno}: {what}" for node, what in found]


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_what_it_was_given(file):
    assert offences(file.read_text(), file.name) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from marshal import loads", "import shelve, json", "pickle.loads(b'')", "torch.load(f)",
        "torch.load(f, weights_only=False)", "dist.broadcast_object_list(x)", "dist.all_gather_object(a, b)", "eval(x)",
        "exec(x)", "np.load(f, allow_pickle=True)", "AutoModel.from_pretrained(f, trust_remote_code=True)",
        "subprocess.run(x, shell=True)", "os.system(x)", "asyncio.start_server(f, '0.0.0.0', 0)",
    ],
)  # fmt: skip
def test_what_would_run_it_is_seen(code):
    assert len(offences(code)) == 1
    assert offences(f"def f():\n    {code}")[0].startswith("line 2: ")


def test_the_code_in_a_model_folder_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(ValueError, match=r"no model folder: .* contains custom code"):
        load_config(tmp_path)
    assert not (tmp_path / "ran").exists()
