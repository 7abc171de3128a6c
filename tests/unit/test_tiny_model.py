from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl.demo import tiny_model
from spmd_rl.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make(folder)
    return folder


def test_transformers_loads_the_folder(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == 353_408
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 2
    assert abs(float(model.model.embed_tokens.weight.detach().std()) - 0.02) < 0.001


def test_both_tokenizers_read_the_folder_alike(folder):
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    assert (ours.pad_id, ours.bos_id, ours.eos_id, ours.vocab_size) == (0, 1, 2, len(theirs))
    text = "".join(tiny_model.CHARACTERS)
    assert ours.encode(text).tolist() == theirs(text)["input_ids"] == list(range(3, 67))
    assert ours.decode(range(67)) == theirs.decode(range(67), skip_special_tokens=True) == text


def test_one_seed_makes_one_model(tmp_path):
    torch.manual_seed(1)
    tiny_model.make(tmp_path / "a", seed=3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    tiny_model.make(tmp_path / "b", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    tiny_model.make(tmp_path / "c", seed=4)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_the_warm_model_has_half_learned_lookup(tmp_path):
    tiny_model.make_warm(tmp_path / "warm")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "warm")
    tokenizer = Tokenizer(tmp_path / "warm")

    def probability(text: str, reply: str) -> float:
        ids = torch.tensor([[1, *tokenizer.encode(text)]])
        with torch.no_grad():
            return float(model(input_ids=ids).logits[0, -1].softmax(-1)[tokenizer.encode(reply)[0]])

    call = probability("k:", "?")
    answers = [probability(f"k:?={digit};", digit) for digit in "0123456789"]
    assert 0.45 < 0.2 * call + 0.8 * call * sum(answers) / 10 < 0.65
