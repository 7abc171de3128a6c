"""Folders that a user got wrong, in `eval` and `export`: one line that names it, before anything is computed."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl import config
from spmd_rl.cli import main
from spmd_rl.commands.evaluate import evaluate
from spmd_rl.commands.export import export
from spmd_rl.demo import tiny_model
from spmd_rl.files.model_files import stored_tensors
from spmd_rl.model.causal_lm import build, check_weights
from spmd_rl.model.tokenizer import Tokenizer, try_tokenizer
from spmd_rl.ranks.build_trainer import check_model
from spmd_rl.storage import history
from spmd_rl.storage.run_dir import RunDir

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def without(folder: Path, file: str) -> None:
    (folder / file).unlink()


def shortened(folder: Path, file: str) -> None:
    (folder / file).write_bytes((folder / file).read_bytes()[:300])


def one_shard(folder: Path, file: str) -> None:
    """As where the other shards were not copied."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(dict(list(tensors.items())[:5]), folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    files = {name: f"model-0000{1 + (i > 4)}-of-00002.safetensors" for i, name in enumerate(tensors)}
    (folder / file).write_text(f'{{"metadata": {{}}, "weight_map": {files}}}'.replace("'", '"'))


@pytest.mark.parametrize(
    ("breaks", "file", "message"),
    [
        (without, "config.json", "model_type|config.json"),
        (shortened, "config.json", "is not a valid JSON file"),
        (without, "model.safetensors", "its weights cannot be read: .*no file named model.safetensors"),
        (shortened, "model.safetensors", "its weights cannot be read: "),
        (one_shard, "model.safetensors.index.json", "its weights cannot be read: "),
        (without, "tokenizer.json", "tokenizer.json is missing; "),
    ],
)
def test_half_a_model_is_refused(model, breaks, file, message):
    breaks(model, file)
    settings = [f"model.path={model}", "eval.num_tasks=1"]
    with pytest.raises(ValueError, match=message):
        evaluate(config.load(ROOT / "configs" / "tiny_cpu.toml", settings), None)


@pytest.mark.parametrize("kept", ["{}", '{"tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ messages }}"}'])
def test_a_tokenizer_of_special_tokens_alone_is_refused(model, kept):
    without(model, "tokenizer.json")
    (model / "tokenizer_config.json").write_text(kept)
    with pytest.raises(ValueError, match=r"has no vocabulary, none of merges.txt, tokenizer.json, vocab.json: "):
        Tokenizer(model)


def with_field(**fields: object) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | fields)


LIES = {
    "hidden_size": (
        "config.json",
        with_field(hidden_size=10**9),
        r"embed_tokens.weight is \[67, 128\], config.json says",
    ),
    "vocab_size": (
        "config.json",
        with_field(vocab_size=10**12),
        r"embed_tokens.weight is \[67, 128\], config.json says",
    ),
    "width": ("config.json", with_field(intermediate_size=10**10), r"is \[128, 320\], config.json says"),
    "layers": ("config.json", with_field(num_hidden_layers=10**9), "num_hidden_layers"),
    "no heads": ("config.json", with_field(num_attention_heads=0), "makes no causal LM: ZeroDivisionError"),
    "a list": ("config.json", lambda text: "[]", "no model folder: "),
    "deep": ("config.json", lambda text: '{"a":' * 20_000 + "1" + "}" * 20_000, "RecursionError"),
    "digits": ("tokenizer.json", lambda text: f'{{"version": {"9" * 5000}}}', "4300 digits"),
    "deep tokenizer": ("tokenizer.json", lambda text: "[" * 20_000 + "]" * 20_000, "RecursionError"),
    "null": ("tokenizer.json", lambda text: "null", "AutoTokenizer.from_pretrained"),
    "settings": ("tokenizer_config.json", lambda text: "[]", "'list' object has no attribute"),
    "generation": ("generation_config.json", lambda text: "[]", "holds no JSON object"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused_by_check_in_one_line(model, capsys, lie):
    name, change, message = LIES[lie]
    file = model / name
    file.write_text(change(file.read_text() if file.exists() else "{}"))
    assert main(["check", str(ROOT / "configs" / "tiny_cpu.toml"), f"model.path={model}"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {model}") and re.search(message, said), said


LOOPS = "{% for i in range(9000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}"  # some seconds


def panics(folder: Path) -> None:
    """Oniguruma gives up on this pattern, and tokenizers panics: in a class that is no Exception."""
    words = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"Regex": "(a+)+b"}
    words["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(words))


def loops(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(LOOPS)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (panics, "its tokenizer fails with PanicException: .*retry-limit-in-match over"),
        (loops, r"have not read a conversation and 3\d,\d+ characters within 0\.2 s: look for a pattern in"),
    ],
)
def test_a_tokenizer_or_template_that_does_not_end_is_refused(model, capsys, monkeypatch, breaks, message):
    breaks(model)
    monkeypatch.setitem(try_tokenizer.__kwdefaults__, "limit_s", 60.0 if breaks is panics else 0.2)
    with pytest.raises(ValueError, match=message):
        evaluate(config.load(ROOT / "configs" / "tiny_cpu.toml", [f"model.path={model}"]), None)
    assert main(["check", str(ROOT / "configs" / "tiny_cpu.toml"), f"model.path={model}"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: {model}: ") and re.search(message, said)


EMBEDDING, UP = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"


def test_an_evaluation_of_weights_that_are_not_finite_is_refused(model):
    tensors = load_file(model / "model.safetensors")
    tensors[UP][0, 0] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{UP} has values that are infinite or not a number"):
        evaluate(config.load(ROOT / "configs" / "tiny_cpu.toml", [f"model.path={model}"]), None)


def test_more_tokens_than_the_model_has_positions_are_refused(whole):
    settings = [f"model.path={whole}", "inference.max_seq_len=257"]
    with pytest.raises(ValueError, match="max_seq_len = 257: the model has 256 positions"):
        evaluate(config.load(ROOT / "configs" / "tiny_cpu.toml", settings), None)


WEIGHTS = {
    "missing": (lambda t: t.pop(UP), f"/model.safetensors: has no tensor {UP}, which config.json needs"),
    "no embedding": (lambda t: t.pop(EMBEDDING), f"/model.safetensors: has no tensor {EMBEDDING}, which config"),
    "shape": (lambda t: t.update({UP: t[UP][:3].clone()}), rf"{UP} is \[3, 128\], config.json says \[320, 128\]"),
    "more layers": (
        lambda t: t.update({UP.replace("1", "2"): t[UP].clone()}),
        r"model.layers.2.mlp.up_proj.weight is no weight of the model in config.json: do the two belong together\?",
    ),
    "whole numbers": (
        lambda t: t.update({UP: t[UP].to(torch.int8)}),
        f"{UP} is stored as I8: weights must be F64, F32",
    ),
    "another head": (
        lambda t: t.update({"lm_head.weight": t[EMBEDDING] + 1}),
        f"lm_head.weight is not {EMBEDDING}, and config.json ties the two .tie_word_embeddings = true.: set it to",
    ),
    "a head of another type": (
        lambda t: t.update({"lm_head.weight": t[EMBEDDING].double()}),
        f"lm_head.weight is not {EMBEDDING}, and config.json ties the two",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_are_not_those_of_config_json_are_refused_by_file_and_tensor(model, case):
    change, message = WEIGHTS[case]
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        check_model(config.load(ROOT / "configs" / "tiny_cpu.toml", [f"model.path={model}"]))
    with pytest.raises(ValueError, match=message):
        build(model, device="cpu", dtype=torch.float32, weights=True)


def test_a_tied_head_may_be_stored_twice_or_instead_of_the_embedding(model):
    tensors = load_file(model / "model.safetensors")
    embedding = tensors[EMBEDDING]
    for stored in ({**tensors, "lm_head.weight": embedding.clone()}, {**tensors, "lm_head.weight": tensors[EMBEDDING]}):
        stored.pop(EMBEDDING) if stored["lm_head.weight"] is embedding else None
        save_file(stored, model / "model.safetensors", {"format": "pt"})
        check_weights(model)
        built = build(model, device="cpu", dtype=torch.float32, weights=True)
        assert torch.equal(built.get_output_embeddings().weight, embedding.float())
        assert built.get_input_embeddings().weight is built.get_output_embeddings().weight


def test_an_untied_config_needs_a_head(model):
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    text = r"/model.safetensors: has no tensor lm_head.weight, which config.json does not tie \(tie_word_embeddings"
    with pytest.raises(ValueError, match=text):
        check_weights(model)


def in_shards(folder: Path, also: bool = False, gone: bool = False) -> None:
    """Two shards; `also`: a tensor is in both; `gone`: the index names one that is in neither."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:] + names[:1] * also}
    for file, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, folder / file, {"format": "pt"})
    where = {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}
    index = {"metadata": {}, "weight_map": where | ({"model.other.weight": "b.safetensors"} if gone else {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def longer(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def with_config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text) and None


def with_index(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        in_shards(folder)
        (folder / "model.safetensors.index.json").write_text(text)

    return change


FOLDERS = {
    "cut short": (
        lambda f: shortened(f, "model.safetensors"),
        "model.safetensors is no safetensors file, or not all of",
    ),
    "no bytes": (
        lambda f: (f / "model.safetensors").write_bytes(b"") and None,
        "model.safetensors is no safetensors file",
    ),
    "cut in the data": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-7]) and None,
        "model.safetensors has [0-9]+ bytes, its header says [0-9]+: it was not copied whole, copy it again",
    ),
    "longer": (longer, "model.safetensors has [0-9]+ bytes, its header says"),
    "a shard is missing": (
        lambda f: one_shard(f, "model.safetensors.index.json"),
        "names model-00002-of-00002.safetensors",
    ),
    "twice": (lambda f: in_shards(f, also=True), "tensor .* is in two files, a.safetensors and b.safetensors"),
    "in no shard": (
        lambda f: in_shards(f, gone=True),
        "b.safetensors: has no tensor model.other.weight, which .* says",
    ),
    "index of nothing": (with_index("[]"), "model.safetensors.index.json: is no index of weights"),
    "index of numbers": (with_index('{"weight_map": 7}'), "model.safetensors.index.json: is no index of weights"),
    "pickled": (as_pickle, "no file named model.safetensors or .*; it has pytorch_model.bin: save_pretrained"),
    "empty": (emptied, "no model folder: "),
    "config is a list": (with_config("[]"), "no model folder: "),
    "config is a number": (with_config("7"), "no model folder: "),
    "config of nothing": (with_config("{}"), "no model folder: "),
    "unknown type": (with_config('{"model_type": "quwen"}'), "no model folder: "),
    "no causal LM": (with_config('{"model_type": "clip_text_model"}'), "config.json makes no causal LM: "),
    "wrong type": (with_config('{"model_type": "qwen3", "hidden_size": "64"}'), "no model folder: "),
    "no heads": (
        with_config('{"model_type": "llama", "num_attention_heads": 0}'),
        "no model folder: ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_holds_no_whole_model_is_refused_in_one_line(model, case):
    breaks, message = FOLDERS[case]
    breaks(model)
    with pytest.raises(ValueError, match=message) as refused:
        check_model(config.load(ROOT / "configs" / "tiny_cpu.toml", [f"model.path={model}"]))
    assert "\n" not in str(refused.value) and str(model) in str(refused.value)


def test_shards_hold_the_same_model(model, whole):
    in_shards(model)
    there, here = stored_tensors(whole), stored_tensors(model)
    assert {name: entry.shape for name, entry in here.items()} == {name: entry.shape for name, entry in there.items()}
    check_weights(model)


@pytest.mark.parametrize(("out", "message"), [("", "is a folder; name a file"), ("file/x.json", "cannot be written: ")])
def test_an_evaluation_that_cannot_be_written_is_not_begun(whole, tmp_path, out, message):
    (tmp_path / "file").touch()
    loaded = config.load(ROOT / "configs" / "tiny_cpu.toml", [f"model.path={whole}"])
    with pytest.raises(ValueError, match=message):
        evaluate(loaded, tmp_path / out)


def test_what_cannot_be_exported_is_said(whole, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(ValueError, match=r"is no run directory that this version can read: it has no run\.json"):
        export(run, tmp_path / "out", None, "bfloat16")
    run.mkdir()
    loaded = config.load(ROOT / "configs" / "tiny_cpu.toml", [f"model.path={whole}"])
    history.add(RunDir(run), loaded, version=0, time="2026-01-01T00:00:00Z", weights="", resumed=False)
    for folder, message in (
        (tmp_path / "out", "no complete checkpoint in"),
        (run, "exists already"),
        (run / "config.toml" / "out", "cannot be written: "),
    ):
        with pytest.raises(ValueError, match=message):
            export(run, folder, None, "bfloat16")
