"""What a resume depends on is compared by content: the same goes on, another is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl import config as config_module
from spmd_rl.demo import tiny_model
from spmd_rl.storage import continuation
from spmd_rl.types import Task

EVAL = {"a": [Task(env="a", task_id="0", data={"n": 1})]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("continuation") / "tiny"
    tiny_model.make(path)
    return path


def tree(folder, **sections):
    base = {"model": {"path": str(folder)}, "env": {"a": {"path": "a:b"}, "b": {"path": "a:b"}}}
    return base | {"rollout": {"batch_size": 8, "group_size": 2}} | sections


def facts(folder, *, eval_tasks=EVAL, **sections):
    config = config_module.from_tree(tree(folder, **sections))
    return json.loads(json.dumps(continuation.facts(config, eval_tasks))), config


def compare(tiny, other, *, before=None, anew=False, eval_tasks=EVAL, **sections):
    there, _ = facts(tiny, **(before or {}))
    here, config = facts(other, eval_tasks=eval_tasks, **sections)
    return continuation.compare(there, here, config, restart="RESTART", anew=anew)


ENVS = {"a": {"path": "a:b"}, "b": {"path": "a:b", "weight": 3.0}}
DATA = [
    ({"run": {"seed": 7}}, "run.seed = 7, it was 0: "),
    ({"env": ENVS}, "env.b.weight = 3.0, it was 1.0: "),
    ({"env": {"a": {"path": "a:b"}}}, "env.b.weight = not there, it was 1.0: "),
    ({"env": {**ENVS, "b": {"path": "a:b"}, "c": {"path": "a:b"}}}, "env.c.weight = 1.0, it was not there: "),
    ({"env": {"a": {"path": "a:b"}, "z": {"path": "a:b"}}}, "env.b.weight = not there, it was 1.0: "),  # renamed
]
FIXED = [
    ({"rollout": {"batch_size": 8, "group_size": 4}}, "rollout.group_size = 4, it was 2: "),
    ({"trainer": {"advantage": "gae"}}, "critic is own, it was none"),
    ({"trainer": {"advantage": "gae"}, "critic": {"body": "shared"}}, "critic is shared, it was none"),
]


@pytest.mark.parametrize(("sections", "message"), DATA + FIXED)
def test_what_was_drawn_and_how_is_refused_by_name_and_lifted_where_the_data_start_anew(tiny, sections, message):
    with pytest.raises(ValueError, match=message) as refused:
        compare(tiny, tiny, **sections)
    lifted = (sections, message) in DATA
    assert ("RESTART" in str(refused.value)) == lifted
    if lifted:
        assert compare(tiny, tiny, anew=True, **sections) == []
    else:
        with pytest.raises(ValueError, match=message):
            compare(tiny, tiny, anew=True, **sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"steps": 7, "stall_timeout_s": 5.0}},
        {"trainer": {"loss": "ppo", "betas": (0.8, 0.9), "learning_rate": 1.0}},
        {"topology": {"trainer": 2}, "inference": {"max_seq_len": 999}},
        {"rollout": {"batch_size": 16, "group_size": 2}},
        {"env": {"a": {"path": "a:b", "args": {"timeout_s": 3.0}}, "b": {"path": "a:b"}}},
    ],
)
def test_what_cannot_change_what_was_drawn_goes_on(tiny, sections):
    assert compare(tiny, tiny, **sections) == []


def test_template_variables_are_refused_unless_the_data_start_anew(tiny):
    model = {"path": str(tiny), "template": {"enable_thinking": False}}
    with pytest.raises(ValueError, match=r'model.template = {"enable_thinking": false}, it was {}: .*RESTART'):
        compare(tiny, tiny, model=model)
    assert compare(tiny, tiny, model=model, anew=True) == []


def edited(tiny, tmp_path, file, change):
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    content = json.loads((other / file).read_text()) if (other / file).is_file() else {}
    (other / file).write_text(json.dumps(content | change))
    return other


def test_another_chat_template_and_another_tokenizer_are_refused(tiny, tmp_path):
    other = edited(tiny, tmp_path, "tokenizer_config.json", {"chat_template": "{{ messages[0] }}"})
    (other / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"chat template is another, by content: .*RESTART"):
        compare(tiny, other)
    assert compare(tiny, other, anew=True) == []
    other = edited(tiny, tmp_path / "second", "tokenizer.json", {"normalizer": {"type": "NFC"}})
    for anew in (False, True):
        with pytest.raises(ValueError, match=r"tokenizer is another, by content: .*new run\.dir"):
            compare(tiny, other, anew=anew)


def test_other_tokens_that_end_a_reply_are_refused(tiny, tmp_path):
    other = edited(tiny, tmp_path, "generation_config.json", {"eos_token_id": [1, 5]})
    with pytest.raises(ValueError, match=r"eos_token_id of generation_config\.json = \[1, 5\], it was .*RESTART"):
        compare(tiny, other)
    assert compare(tiny, other, anew=True) == []


KL = {"trainer": {"kl_coefficient": 0.1}}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (KL, KL, r"other weights than those that the run began with, and trainer\.kl_coefficient = 0\.1"),
        ({}, KL, r"trainer\.kl_coefficient = 0\.1 compares with them"),
        ({"lora": {"rank": 4}}, {"lora": {"rank": 4}}, r"lora\.rank = 4 adds to them"),
        (KL, {}, None),
        ({}, {}, None),
    ],
)
def test_other_weights_are_refused_where_something_refers_to_them(tiny, tmp_path, before, now, message):
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    tensors = load_file(other / "model.safetensors")
    name = sorted(tensors)[0]
    tensors[name] = torch.nextafter(tensors[name].float(), torch.tensor(9.0)).to(tensors[name].dtype) + 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    if message:
        for anew in (False, True):
            with pytest.raises(ValueError, match=message):
                compare(tiny, other, before=before, anew=anew, **now)
    else:
        (line,) = compare(tiny, other, before=before, **now)
        assert str(other) in line and "not used, the checkpoint's are" in line
    copied = tmp_path / "copied"
    shutil.copytree(tiny, copied)
    assert compare(tiny, copied, before=before, **now) == []  # the same content in another place


def test_other_tasks_of_evaluations_are_told(tiny):
    (line,) = compare(tiny, tiny, eval_tasks={"a": [Task(env="a", task_id="0", data={"n": 2})]})
    assert line.startswith("evaluations are of other tasks")


@pytest.mark.parametrize(
    ("wanted", "version", "data_from", "anew"),
    [
        (-1, 20, 0, False),
        (20, 20, 0, True),
        (20, 20, 20, False),
        (20, 40, 20, False),
        (40, 40, 20, True),
        (0, 40, 0, False),
    ],
)
def test_data_start_anew_at_the_version_that_is_named_and_once(wanted, version, data_from, anew):
    config = config_module.from_tree(tree("m", data={"restart_at": wanted}))
    assert continuation.data_anew(config, version, data_from) == anew


@pytest.mark.parametrize(("wanted", "version", "data_from"), [(20, 40, 0), (20, 0, 0), (40, 20, 0)])
def test_a_version_that_is_not_resumed_is_refused(wanted, version, data_from):
    config = config_module.from_tree(tree("m", data={"restart_at": wanted}))
    with pytest.raises(ValueError, match=f"data.restart_at = {wanted}, but the run goes on from version {version}"):
        continuation.data_anew(config, version, data_from)
