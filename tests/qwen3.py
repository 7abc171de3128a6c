"""A folder that is to us what one of Qwen3's is: its architecture with few random weights, its special tokens and stop
ids, and a chat template of our own that treats thinking, tools and their replies as Qwen3's does."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import tokenizers
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]  # not special
TEMPLATE = """{%- set last = namespace(asked=0) %}
{%- for message in messages if message.role == 'user' %}{% set last.asked = messages.index(message) %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {%- set said = message.content %}
        {%- if message.role == 'assistant' and loop.index0 < last.asked %}
            {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + said + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '') }}
{%- endif %}"""

SMALLER = [
    "run.steps=2",
    "topology.inference=1",
    "topology.trainer=1",
    "rollout.batch_size=8",
    "rollout.group_size=4",
    "rollout.max_tokens=12",
    "staleness.max_concurrent=16",
    "inference.max_slots=16",
    "inference.max_seq_len=192",
    "inference.kv_cache_mib=64",
    "trainer.micro_batch_tokens=512",
    "trainer.max_empty_batches=9",
    "eval.num_tasks=2",
    "checkpoint.every=1",
]  # overrides with which a config for GPUs is a short job on two CPU ranks


def write(folder: Path) -> Path:
    """config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json."""
    bytes_ = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(bytes_)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(WORDS)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.get_vocab_size() + 9,  # rows that no token has, as in Qwen3
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # vLLM takes no 16 on CPUs
            max_position_embeddings=40960,
            tie_word_embeddings=True,
        )
    )
    end_of_text, _, im_end = (tokenizer.token_to_id(token) for token in SPECIAL)
    model.generation_config.eos_token_id = [im_end, end_of_text]
    model.generation_config.pad_token_id = end_of_text
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


def data(config: Path, folder: Path) -> list[str]:
    """Overrides that give the task of a config two small files, and random replies a reward now and then."""
    row = json.dumps({"question": "3+4?", "problem": "3+4?", "answer": "#### 7", "solution": "So \\boxed{7}"})
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(f"{row}\n" * 8)
    (env,) = tomllib.loads(config.read_text())["env"]
    args = {"path": f"{folder}/train.jsonl", "eval_path": f"{folder}/test.jsonl", "form": "[^a-m]*"}
    return [f"env.{env}.args.{name}={value}" for name, value in args.items()]
