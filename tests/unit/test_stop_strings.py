"""Stop strings: the token that completes one is the last, whatever tokens the string is made of."""

import numpy as np
import pytest
import torch

from spmd_rl.engine.native import NativeEngine
from spmd_rl.engine.stops import completes_stop
from spmd_rl.model.causal_lm import build
from spmd_rl.types import Sampling
from tests.unit.families import VOCAB, load, prompt_of, save

LETTERS = [chr(ord("a") + i % 26) for i in range(VOCAB)]


def spell(token_ids):
    return "".join(LETTERS[i] for i in token_ids)


def utf8(token_ids):  # a token a byte
    return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "stop", "ends_at"),
    [
        ("hello", ("e",), 2),
        ("hello", ("llo",), 5),
        ("hello", ("x", "el"), 3),
        ("hello", ("hello!",), None),
        ("a\n\nb", ("\n\n",), 3),
        ("so: 😀 yes", ("😀",), len("so: 😀".encode())),
        ("漢字と漢", ("字と",), len("漢字と".encode())),
        ("x" * 500 + "END", ("END",), 503),
        ("", ("a",), None),
        ("abc", (), None),
    ],
)
def test_a_string_ends_the_turn_at_the_token_that_completes_it(text, stop, ends_at):
    token_ids = list(text.encode())
    ends = [n for n in range(1, len(token_ids) + 1) if completes_stop(token_ids[:n], stop, utf8)]
    assert (ends[0] if ends else None) == ends_at


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = save("llama", tmp_path_factory.mktemp("model"))
    model = build(folder, device="cpu", dtype=torch.float32, weights=False)
    engine = NativeEngine(model=model, device=torch.device("cpu"), max_seq_len=256, decode=spell)
    engine.load_weights(dict(load(folder).named_parameters()), 0)
    return engine


def run(engine, **sampling):
    engine.submit(0, prompt_of(6), Sampling(max_tokens=40, seed=5, **sampling))
    while not (ended := engine.step()):
        pass
    return ended[0][1]


def test_the_native_engine_keeps_what_was_sampled_up_to_there_with_its_log_probs(engine):
    free = run(engine)
    text = spell(free.token_ids)
    stop = text[10:12]
    size = text.index(stop) + 2
    cut = run(engine, stop=("not in it", stop))
    assert cut.finish_reason == "stop"
    np.testing.assert_array_equal(cut.token_ids, free.token_ids[:size])
    np.testing.assert_array_equal(cut.logprobs, free.logprobs[:size])
    assert engine.num_running == 0
    assert run(engine, stop=("0",)).finish_reason == "length"


def test_what_no_engine_can_stop_at_is_refused(engine):
    with pytest.raises(ValueError, match="an empty string"):
        engine.submit(1, prompt_of(6), Sampling(max_tokens=4, stop=("a", "")))
    engine._decode, decode = None, engine._decode
    with pytest.raises(ValueError, match="built without a tokenizer"):
        engine.submit(1, prompt_of(6), Sampling(max_tokens=4, stop=("a",)))
    engine._decode = decode
