import asyncio

import numpy as np
import pytest

from spmd_rl.envs.chat import Chat, Rewritten
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.packing import packing
from spmd_rl.types import Task
from tests.says import CHATML, Says, trained_text, write_folder

DROPS_THINKING = """{%- for message in messages %}
    {%- set content = message['content'] if loop.last else message['content'].split('</think>')[-1] %}
    {{- '<|start|>' + message['role'] + '\\n' + content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""
MERGES_TOOLS = """{%- for message in messages %}
    {%- if message['role'] != 'tool' or loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}
        {{- '<|start|>' + message['role'] + '\\n' }}
    {%- endif %}
    {{- message['content'] }}
    {%- if message['role'] == 'tool' and not loop.last and messages[loop.index0 + 1]['role'] == 'tool' %}
        {{- '\\n' }}
    {%- else %}{{- '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""


def converse(tokenizer, policy, *others, **options):
    """A reply to "go", then to each of the others' messages; a tuple is several at once."""
    chat = Chat(
        tokenizer=tokenizer,
        task=Task(env="e", task_id="t"),
        generate=policy,
        messages=[{"role": "user", "content": "go"}],
        **options,
    )

    async def play():
        replies = [await chat.reply()]
        for other in others:
            for content in (other,) if isinstance(other, str) else other:
                chat.add("tool", content)
            replies.append(await chat.reply())
        return replies

    return chat, asyncio.run(play())


def test_a_conversation_is_its_rendering_with_only_the_sampled_turns_trained(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path))
    chat, replies = converse(tokenizer, Says(tokenizer, "one<|end|>", "two<|end|>"), "tool says")
    assert replies == ["one", "two"]
    rendered = tokenizer.render_text(chat.messages, open_reply=False)
    assert tokenizer.decode(chat.rollout.token_ids, special=True) + "\n" == rendered
    assert trained_text(tokenizer, chat.rollout) == "one<|end|>two<|end|>"
    assert (chat.rollout.num_turns, chat.rollout.segments) == (2, [])


def test_sampled_he_llo_does_not_become_hello(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path))
    he, llo, hello, end = (int(tokenizer.encode(text)[0]) for text in ("he", "llo", "hello", "<|end|>"))
    chat, replies = converse(tokenizer, Says(tokenizer, [he, llo, end], "x<|end|>"), "more")
    sampled = chat.rollout.token_ids[chat.rollout.loss_mask].tolist()
    assert replies[0] == "hello" and sampled[:3] == [he, llo, end]
    encoded_again = tokenizer.render(chat.messages, open_reply=False).tolist()
    assert hello in encoded_again and hello not in chat.rollout.token_ids.tolist()


def test_consecutive_tool_messages_are_framed_as_the_template_merges_them(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path, template=MERGES_TOOLS))
    policy = Says(tokenizer, "call<|end|>", "done<|end|>")
    converse(tokenizer, policy, ("a", "b"))
    assert policy.asked[1][0].endswith("call<|end|>\n<|start|>tool\na\nb<|end|>\n<|start|>assistant\n")
    one_by_one = "".join(tokenizer.render_text([{"role": "tool", "content": c}], open_reply=False) for c in "ab")
    assert one_by_one not in policy.asked[1][0]


def test_a_template_that_drops_thinking_starts_a_new_segment(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path, template=DROPS_THINKING))
    policy = Says(tokenizer, "hm</think>7<|end|>", "8<|end|>", "9<|end|>")
    chat, _ = converse(tokenizer, policy, "no", "no")
    again = "<|start|>user\ngo<|end|>\n<|start|>assistant\n7<|end|>\n<|start|>tool\nno<|end|>\n<|start|>assistant\n"
    assert policy.asked[1][0] == again  # without the thinking, in a context of its own
    assert policy.asked[2][0].startswith(again + "8<|end|>")
    first = len(tokenizer.encode("<|start|>user\ngo<|end|>\n<|start|>assistant\nhm</think>7<|end|>"))
    assert chat.rollout.segments == [first]
    assert trained_text(tokenizer, chat.rollout) == "hm</think>7<|end|>8<|end|>9<|end|>"


def test_segments_are_trained_as_sequences_with_the_reward_of_their_rollout(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path, template=DROPS_THINKING))
    whole, _ = converse(tokenizer, Says(tokenizer, "7<|end|>", "8<|end|>"), "no")
    split, _ = converse(tokenizer, Says(tokenizer, "hm</think>7<|end|>", "8<|end|>"), "no")
    whole.rollout.ticket, split.rollout.ticket = 3, 4
    packed = packing.pack([whole.rollout, split.rollout], np.array([0.5, -0.5], np.float32))
    parts = packing.by_segment(packed)
    assert parts.ticket.tolist() == [3, 4, 4] and parts.advantage.tolist() == [0.5, -0.5, -0.5]
    bounds = [len(whole.rollout.token_ids), split.rollout.segments[0]]
    assert parts.cu_seqlens.tolist() == [0, bounds[0], sum(bounds), len(packed.token_ids)]
    assert not parts.loss_mask[parts.cu_seqlens[:-1]].any()  # each begins with a prompt
    restored = packing.unpack(packed)[1]
    assert restored.segments == split.rollout.segments
    assert packing.by_segment(packing.pack([whole.rollout])).ticket.tolist() == [3]


def test_a_template_that_drops_thinking_is_refused_by_option(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path, template=DROPS_THINKING))
    policy = Says(tokenizer, "hm</think>7<|end|>")
    with pytest.raises(Rewritten, match=r"not append-only: after .*assistant\\n' it renders '7<.* where 'hm</think>7"):
        converse(tokenizer, policy, "no", on_rewrite="refuse")


def test_a_template_that_trims_replies_is_no_silent_mismatch(tmp_path):
    trims = CHATML.replace("message['content']", "message['content'] | trim")
    tokenizer = Tokenizer(write_folder(tmp_path, template=trims))
    chat, _ = converse(tokenizer, Says(tokenizer, "one <|end|>", "two<|end|>"), "x")
    assert len(chat.rollout.segments) == 1


def test_a_stop_id_that_is_not_the_eos_ends_the_turn_once(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path, eos="<|eos|>"))
    end = int(tokenizer.encode("<|end|>")[0])
    assert tokenizer.eos_id != end and end in tokenizer.stop_ids
    chat, replies = converse(tokenizer, Says(tokenizer, "one<|end|>", "two<|end|>"), "x")
    assert replies == ["one", "two"]
    assert "<|end|><|end|>" not in tokenizer.decode(chat.rollout.token_ids, special=True)


def test_a_stop_that_the_template_does_not_write_starts_a_new_segment(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path))
    policy = Says(tokenizer, "one<|eos|>", "two<|end|>")
    chat, _ = converse(tokenizer, policy, "x")
    assert len(chat.rollout.segments) == 1 and "<|eos|>" not in policy.asked[1][0]
    assert trained_text(tokenizer, chat.rollout) == "one<|eos|>two<|end|>"


def test_a_turn_cut_at_the_limit_is_closed_outside_the_loss(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path))
    policy = Says(tokenizer, "on", "two", finish_reason="length")
    chat, _ = converse(tokenizer, policy, "x")
    assert chat.truncated and "on<|end|>\n<|start|>tool\nx" in policy.asked[1][0]
    assert trained_text(tokenizer, chat.rollout) == "ontwo"


def test_with_pad_equal_to_eos_exactly_one_eos_is_trained(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path, eos="<|end|>", pad="<|end|>"))
    assert tokenizer.pad_id == tokenizer.eos_id
    chat, _ = converse(tokenizer, Says(tokenizer, "one<|end|>"))
    packed = packing.pack([chat.rollout, chat.rollout])
    for a, b in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
        ids, mask = packed.token_ids[a:b], packed.loss_mask[a:b]
        assert (ids[mask] == tokenizer.eos_id).sum() == 1 and ids[-1] == tokenizer.eos_id and mask[-1]


def test_an_option_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="on_rewrite = 'x': must be one of segment, refuse"):
        converse(Tokenizer(write_folder(tmp_path)), None, on_rewrite="x")
