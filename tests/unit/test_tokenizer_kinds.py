"""Every kind of tokenizer that models come with, against AutoTokenizer on the same folder."""

import asyncio
import json

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from spmd_rl.envs.chat import Chat
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import Completion, Task
from tests.says import Says

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
WORDS = ["user hello world", "assistant what is the sum of 3 and 8", "the answer is 11", "tool says so", "and then"]
ROLES = ["user", "assistant", "tool", "assistant", "user", "assistant"]
TEXTS = [
    "hello world",
    " two  leading blanks",
    "the answer\n\n\nis 11\n",
    "漢字 é 😀👍🏽 ไทย",
    "hello</s>hello <s> world",
    "",
]
TEMPLATES = {
    "lines": "{% for m in messages %}{{ bos_token }}{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}",
    "tight": "{% for m in messages %}{{ m.content }}</s>{% endfor %}",
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
}


def byte_level(prefix):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return backend, trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=special(), show_progress=False
    )


def metaspace(scheme, model=models.Unigram):
    backend = Backend(model(unk_token="<unk>") if model is models.BPE else model())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if model is models.Unigram:
        trainer = trainers.UnigramTrainer(
            vocab_size=60, special_tokens=special(), unk_token="<unk>", show_progress=False
        )
    else:
        trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=special(), show_progress=False)
    return backend, trainer


def word_piece():
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend, trainers.WordPieceTrainer(vocab_size=80, special_tokens=special(), show_progress=False)


KINDS = {
    "byte-level": lambda: byte_level(False),
    "byte-level with a prefix": lambda: byte_level(True),
    "unigram first": lambda: metaspace("first"),
    "unigram always": lambda: metaspace("always"),
    "unigram never": lambda: metaspace("never"),
    "bpe first": lambda: metaspace("first", models.BPE),
    "word-piece": word_piece,
}


def special():
    return [AddedToken(text, normalized=False, special=True) for text in SPECIAL.values()]


def write(folder, kind, *, template="lines", in_file="tokenizer_config.json", change=lambda backend: None, extra=()):
    backend, trainer = KINDS[kind]()
    backend.train_from_iterator(WORDS * 20, trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in extra])
    change(backend)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATES[template]}
    if in_file == "tokenizer_config.json":
        config |= SPECIAL
    elif in_file == "special_tokens_map.json":
        (folder / in_file).write_text(json.dumps({name: {"content": text} for name, text in SPECIAL.items()}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def bake_in(backend):
    backend.enable_truncation(4)
    backend.enable_padding(length=12, pad_token="<pad>", pad_id=3)


@pytest.mark.parametrize("change", [lambda backend: None, bake_in], ids=["as it is", "truncation and padding inside"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_autotokenizer(tmp_path, kind, change):
    folder = write(tmp_path, kind, change=change)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, special=True) == theirs.decode(ids)


@pytest.mark.parametrize("in_file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_are_found_in_either_file(tmp_path, in_file):
    tokenizer = Tokenizer(write(tmp_path, "byte-level", in_file=in_file))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.render([{"role": "user", "content": "x"}])[0] == 1


def test_without_either_file_special_tokens_of_tokenizer_json_are_still_one_token_each(tmp_path):
    tokenizer = Tokenizer(write(tmp_path, "byte-level", in_file=""))
    assert tokenizer.encode("<s>hello</s>")[[0, -1]].tolist() == [1, 2]
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.stop_ids == (2,)  # the template's


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_a_conversation_are_those_of_its_whole_text(tmp_path, kind, template):
    folder = write(tmp_path, kind, template=template)
    messages = [{"role": role, "content": content} for role, content in zip(ROLES, [*WORDS, "is"], strict=True)]
    theirs = AutoTokenizer.from_pretrained(folder)
    whole = np.array(theirs.apply_chat_template(messages, tokenize=True, return_dict=False), np.int32)

    async def generate(context, max_tokens=None):
        assert context.tolist() == whole[: len(context)].tolist()
        end = len(context) + int(np.argmax(whole[len(context) :] == 2)) + 1
        ids = whole[len(context) : end]
        return Completion(
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish_reason="stop",
        )

    chat = Chat(tokenizer=Tokenizer(folder), task=Task(env="e", task_id="t"), generate=generate, messages=messages[:1])

    async def play():
        for others in (messages[2:3], messages[4:5], []):
            await chat.reply()
            for other in others:
                chat.add(other["role"], other["content"])

    asyncio.run(play())
    assert chat.rollout.token_ids.tolist() == whole[: len(chat.rollout.token_ids)].tolist()
    assert chat.rollout.segments == []
    assert chat.rollout.num_turns == 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word-piece"])  # which knows no blanks
@pytest.mark.parametrize(
    ("before", "text"), [("hello</s>", "hello"), ("the sum", " of 3"), ("is 1", "1 and"), ("hel", "lo"), ("a", "")]
)
def test_a_continuation_holds_no_mark_of_a_beginning(tmp_path, kind, before, text):
    tokenizer = Tokenizer(write(tmp_path, kind))
    whole = tokenizer.encode(before + text).tolist()
    ids = tokenizer.encode(text, after=before).tolist()
    settled = len(tokenizer.encode(before))
    if whole[:settled] == tokenizer.encode(before).tolist():
        assert ids == whole[settled:]
    assert tokenizer.decode(tokenizer.encode(before).tolist() + ids) == tokenizer.decode(whole)


def judged_text(tokenizer, reply, **options):
    seen = []
    env = SingleTurn(
        tokenizer=tokenizer, prompt=lambda data: "go", reward=lambda data, text: seen.append(text) or 1.0, **options
    )
    asyncio.run(env.rollout(Task(env="e", task_id="t"), Says(tokenizer, reply)))
    return seen[0]


@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        ("", "11"),
        (r"<answer>\d+</answer>", "<answer>11</answer>"),
        (r".*<answer>(\d+)", "<answer>11"),
        ("</s>", "11</s>"),
    ],
)
def test_a_judge_sees_the_special_tokens_that_its_rule_names(tmp_path, rule, seen):
    tokenizer = Tokenizer(write(tmp_path, "byte-level", extra=("<answer>", "</answer>")))
    assert judged_text(tokenizer, "<answer>11</answer></s>", rule=rule) == seen
