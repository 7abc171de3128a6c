import json
import subprocess
import sys

import pytest
import tokenizers
from transformers import AutoTokenizer

from spmd_rl.model.tokenizer import Tokenizer

CHATML = """{%- if messages[0]['role'] != 'system' %}{{ '<|start|>system\\nBe kind.<|end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|end|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + '<|end|>' }}
    {%- endif %}
    {{- '\\n' }}
    {%- if message['role'] == 'tool' %}{% continue %}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""
CHAT = [{"role": "user", "content": "What is 3 + 8?"}, {"role": "assistant", "content": "<11> & é"}]


def write_folder(folder, *, template=CHATML, eos="<|eos|>", generation=None, template_in_config=True):
    bytes_ = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|eos|>", "<|start|>", "<|end|>", *bytes_])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>", "<|start|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": "<|eos|>"}
    if template and template_in_config:
        settings["chat_template"] = template
    elif template:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("template_in_config", [True, False])
@pytest.mark.parametrize("open_reply", [True, False])
def test_conversations_render_as_in_transformers(tmp_path, open_reply, template_in_config):
    write_folder(tmp_path, template_in_config=template_in_config)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for chat in (CHAT[:1], CHAT, [{"role": "system", "content": "Reply."}, *CHAT]):
        for tools in (None, [{"name": "<add>"}]):
            ids = theirs.apply_chat_template(chat, tools=tools, add_generation_prompt=open_reply, return_dict=False)
            assert Tokenizer(tmp_path).render(chat, open_reply=open_reply, tools=tools).tolist() == ids


def test_stop_ids_come_from_generation_config_tokenizer_and_template(tmp_path):
    write_folder(tmp_path, generation={"eos_token_id": [7, 9]})
    assert Tokenizer(tmp_path).stop_ids == (0, 2, 7, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"holds no JSON object but \[\]"),
        ("[" * 10_000, "no JSON: maximum recursion"),
        ("{", "no JSON: Expecting"),
    ],
)
def test_a_generation_config_that_is_none_is_refused_by_name(tmp_path, text, message):
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"generation_config\.json: {message}"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template", ["{{ 'x' * 10 ** 14 }}", "{{ messages[9].content }}", "{% for %}", "{{ raise_exception('no') }}"]
)
def test_a_template_that_cannot_be_used_is_refused_in_one_line(tmp_path, template):
    with pytest.raises(ValueError, match=r": its chat template cannot be used: \w+") as caught:
        Tokenizer(write_folder(tmp_path, template=template))
    assert "\n" not in str(caught.value)


def test_a_single_stop_id_is_named_once(tmp_path):
    write_folder(tmp_path, eos="<|end|>", generation={"eos_token_id": 2})
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.stop_ids == (2,)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (2, 0, None)


def test_special_tokens_are_read_and_left_out(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path))
    ids = tokenizer.encode("<|start|>hé 漢<|end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hé 漢"
    assert tokenizer.decode(ids, special=True) == "<|start|>hé 漢<|end|>"


def test_the_default_of_several_templates_is_used(tmp_path):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "<{{ messages[0].content }}>"}]
    tokenizer = Tokenizer(write_folder(tmp_path, template=named))
    assert tokenizer.decode(tokenizer.render(CHAT)) == "<What is 3 + 8?>"


def test_a_folder_without_a_template_says_so(tmp_path):
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(write_folder(tmp_path, template=None)).render(CHAT)


def test_a_folder_without_a_tokenizer_says_how_to_write_one(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing; .*save_pretrained"):
        Tokenizer(tmp_path)


def test_neither_tokenizer_nor_environments_import_torch():
    code = (
        "import sys, spmd_rl.model.tokenizer, spmd_rl.rewards.text, spmd_rl.envs.arithmetic, spmd_rl.envs.fraction, "
        "spmd_rl.envs.echo, spmd_rl.envs.lookup; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
