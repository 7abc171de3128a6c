import dataclasses
import itertools
import math
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl.demo import tiny_model
from spmd_rl.model.causal_lm import build, head, hidden_states
from spmd_rl.model.logprobs import Head, token_logprobs
from spmd_rl.objective.corrections import Correction
from spmd_rl.objective.losses import LOSSES, Limits, Rows, TokenLosses
from spmd_rl.objective.objective import AGGREGATIONS, Objective
from spmd_rl.packing.packing import Packed, pack, select
from spmd_rl.trainer.critic import Credit
from spmd_rl.trainer.metrics import MEANS
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.optimizer import square_sum, warmed_up
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.trainer.trainer import Trainer
from spmd_rl.types import Rollout

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make(folder)
    return folder


MODELS = ("reference", "critic", "shared_critic", "activation_checkpointing", "lora")
TOKEN_MEAN = partial(AGGREGATIONS["token_mean"], longest=100)


def load(folder: Path) -> torch.nn.Module:
    return build(folder, device=CPU, dtype=torch.float32, weights=True)


def trainer(folder: Path, **settings: object) -> Trainer:
    models = Models(policy=load(folder), mesh=None, device=CPU, **{k: v for k, v in settings.items() if k in MODELS})
    defaults = {
        "objective": Objective(loss=LOSSES["decoupled"]),
        "aggregation": TOKEN_MEAN,
        "learning_rate": 1e-3,
        "grad_clip": 1e9,
    }
    rest = {k: v for k, v in settings.items() if k not in MODELS}
    return Trainer(models=models, group=None, **(defaults | rest))


def rollout(ticket: int, num_prompt: int, num_sampled: int, version: int = 0) -> Rollout:
    """Random tokens; the behavior log-probs are what `on_policy` puts in."""
    random = np.random.default_rng(ticket)
    made = Rollout(env="e", task_id=str(ticket), ticket=ticket)
    made.append(random.integers(3, 60, num_prompt))
    made.append(random.integers(3, 60, num_sampled), np.full(num_sampled, -4.0), np.full(num_sampled, version))
    return made


def shares(*lengths: tuple[int, int], advantages: Sequence[float] | None = None, version: int = 0) -> Packed:
    rollouts = [rollout(i, *pair, version=version) for i, pair in enumerate(lengths)]
    if advantages is None:
        advantages = [1.0 - 0.7 * i for i in range(len(lengths))]
    return pack(rollouts, np.array(advantages, np.float32))


def on_policy(policy: Trainer, batch: Packed) -> Packed:
    for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        scores = policy.score(batch.token_ids[a:b])
        batch.behavior_logprobs[a:b] = np.where(batch.loss_mask[a:b], scores, 0)
    return batch


def weights(policy: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.models.named_parameters().items()}


def made_up(losses: Callable[[Rows], torch.Tensor]) -> Objective:
    """An objective whose tokens have these losses."""

    def loss(rows: Rows, limits: Limits) -> TokenLosses:
        like = LOSSES["reinforce"](rows, limits)
        return dataclasses.replace(like, losses=losses(rows))

    return Objective(loss=loss, correction=Correction(kind="none"))


def constant_loss(values: dict[float, float]) -> Objective:
    """A token with advantage a has the loss values[a], with gradient."""
    return made_up(
        lambda rows: torch.tensor([values[round(a, 3)] for a in rows.advantages.tolist()]) + 0 * rows.current
    )


@pytest.mark.parametrize(("lengths", "budget", "num"), [([100, 900], 902, 2), ([100, *[90] * 10], 128, 11)])
def test_loss_is_divided_by_the_tokens_of_all_micro_batches(
    folder: Path, lengths: list[int], budget: int, num: int
) -> None:
    """100 tokens at loss 2 and 900 at 0.5 are 0.65, whatever they are cut into."""
    batch = shares(*[(3, n) for n in lengths], advantages=[0.5, *[1.0] * (len(lengths) - 1)])
    policy = trainer(folder, objective=constant_loss({0.5: 2.0, 1.0: 0.5}), micro_batch_tokens=budget)
    metrics = policy.step(batch, 0)
    assert metrics["num_microbatches"] == num
    assert metrics["tokens"] == 1000
    assert metrics["loss"] == pytest.approx(0.65, rel=1e-6)


def test_masked_out_tokens_are_not_in_the_denominator(folder: Path) -> None:
    batch = shares((2, 20), (2, 10), advantages=[1.0, 1.0])
    batch.loss_mask[-5:] = False
    policy = trainer(folder, objective=constant_loss({1.0: 1.0}))
    metrics = policy.step(batch, 0)
    assert (metrics["tokens"], metrics["loss"]) == (25, 1.0)


@pytest.mark.parametrize("micro_batch_tokens", [32, 64, 100_000])
def test_micro_batches_change_neither_gradient_norm_nor_weights(folder: Path, micro_batch_tokens: int) -> None:
    batch = shares((5, 20), (2, 1), (9, 14), (1, 30), (4, 7), advantages=[1, -1, 0.5, -0.2, 2])
    whole = trainer(folder, learning_rate=1e-4)
    cut = trainer(folder, learning_rate=1e-4, micro_batch_tokens=micro_batch_tokens)
    expected, found = whole.step(batch, 0), cut.step(batch, 0)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    others = dict(cut.model.named_parameters())
    for name, tensor in whole.model.named_parameters():
        torch.testing.assert_close(others[name], tensor, rtol=0, atol=1e-5)
        # the first moment is the gradient, without Adam's division that turns noise around 0 into steps
        moments = cut.optimizer.state[others[name]]["exp_avg"], whole.optimizer.state[tensor]["exp_avg"]
        torch.testing.assert_close(*moments, rtol=1e-5, atol=1e-8)


def test_gradient_is_that_of_transformers_and_plain_torch(folder: Path) -> None:
    batch = shares((5, 4), (3, 6), advantages=[1.0, -0.5])
    objective = Objective(loss=LOSSES["reinforce"], correction=Correction(high=1e9))
    policy = trainer(folder, objective=objective, temperature=0.7)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    total = 0.0
    for i, (a, b) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
        ids = torch.from_numpy(batch.token_ids[a:b]).long()
        logprobs = (plain(input_ids=ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        logprobs = logprobs.gather(1, ids[1:, None])[:, 0]
        mask = torch.from_numpy(batch.loss_mask[a:b])[1:]
        behavior = torch.from_numpy(batch.behavior_logprobs[a:b])[1:]
        ratio = (logprobs.detach() - behavior).exp()
        total = total - (float(batch.advantage[i]) * ratio * logprobs)[mask].sum()
    loss = total / 10
    loss.backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in plain.parameters()))
    metrics = policy.step(batch, 0)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_on_policy_importance_and_ratio_are_one_for_every_token_the_first_included(folder: Path) -> None:
    policy = trainer(folder)
    batch = on_policy(policy, shares((1, 1), (1, 8), (6, 40), version=3))
    metrics = policy.step(batch, 3)
    assert metrics["importance_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["importance_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == 1
    assert metrics["clip_share"] == 0
    assert metrics["mismatch_kl"] < 1e-10
    assert metrics["mismatch_tokens"] == metrics["tokens"] == 49


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_greedy_tokens_scored_by_transformers_have_ratio_one(folder: Path, temperature: float) -> None:
    """The log-prob of token t comes from transformers' logits at t - 1, that of the first token included."""
    plain, rollouts = AutoModelForCausalLM.from_pretrained(folder), []
    for i, prompt in enumerate([[5], [7, 9, 11], list(range(3, 30))]):
        ids = plain.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
        with torch.no_grad():
            logprobs = (plain(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        one = Rollout(env="e", task_id=str(i), ticket=i)
        one.append(prompt)
        num = len(prompt)
        one.append(ids[num:], logprobs[num - 1 : -1].gather(1, ids[num:, None])[:, 0], np.zeros(len(ids) - num))
        rollouts.append(one)
    seen: list[Rows] = []

    def watching(rows: Rows, limits: Limits) -> TokenLosses:
        seen.append(rows)
        return LOSSES["decoupled"](rows, limits)

    policy = trainer(folder, objective=Objective(loss=watching), temperature=temperature)
    policy.step(pack(rollouts, np.ones(3, np.float32)), 0)
    (rows,) = seen
    assert len(rows.behavior) == 36
    assert ((rows.current.detach() - rows.behavior).exp() - 1).abs().max() < 1e-5


def test_first_minibatch_has_ratio_exactly_one_and_later_ones_move(folder: Path) -> None:
    seen: list[float] = []

    def watching(rows: Rows, limits: Limits) -> TokenLosses:
        seen.append(float((rows.current.detach() - rows.proximal).abs().max()))
        return LOSSES["decoupled"](rows, limits)

    batch = shares((5, 20), (2, 5), (9, 14), (3, 30), advantages=[1, -1, 0.5, -0.2])
    batch.minibatch[:] = [0, 0, 1, 1]
    policy = trainer(folder, objective=Objective(loss=watching), num_minibatches=2, num_epochs=2, micro_batch_tokens=32)
    metrics = policy.step(batch, 0)
    assert metrics["optimizer_steps"] == policy.num_steps == 4
    assert metrics["tokens"] == metrics["computed_tokens"] == 69  # each once, and twice as input
    assert metrics["input_tokens"] == 2 * (24 + 6 + 22 + 32)
    assert seen[0] == 0.0  # the first minibatch is one micro-batch
    assert all(difference > 0 for difference in seen[1:])
    assert metrics["ratio_max"] > 1


def test_mismatch_is_measured_on_tokens_of_the_trained_version_only(folder: Path) -> None:
    policy = trainer(folder)
    batch = on_policy(policy, shares((4, 10), (4, 10), version=7))
    batch.versions[batch.loss_mask] = np.repeat([6, 7], 10)
    batch.behavior_logprobs[:14] -= 1.0
    metrics = policy.step(batch, 7)
    assert metrics["mismatch_tokens"] == 10
    assert metrics["mismatch_kl"] < 1e-10
    assert metrics["kl_behavior_proximal"] == pytest.approx((math.e - 2) / 2, rel=1e-4)
    assert "mismatch_kl" not in policy.step(batch, 8)


@pytest.mark.parametrize("interpolate", [False, True])
def test_a_mismatch_counts_each_token_once_and_with_its_own_log_prob_of_the_trained_version(
    folder: Path, interpolate: bool
) -> None:
    """Interpolated proximal log-probs are those of behavior after the first step: they would agree with anything."""
    policy = trainer(folder, num_minibatches=2, num_epochs=2, interpolate_proximal=interpolate)
    batch = on_policy(policy, shares((4, 10), (4, 10), (4, 10), (4, 10), version=7))
    batch.behavior_logprobs[batch.loss_mask] -= 0.2
    batch.minibatch[:] = [0, 0, 1, 1]
    metrics = policy.step(batch, 7)
    assert metrics["mismatch_tokens"] == (20 if interpolate else 40)
    assert metrics["mismatch_kl"] == pytest.approx(math.expm1(0.2) - 0.2, rel=1e-3)
    assert metrics["mismatch_max"] == pytest.approx(0.2, rel=1e-3)
    assert metrics["mismatch_p99"] == pytest.approx(0.2, rel=0.01)


def test_maxima_are_maxima_over_micro_batches(folder: Path) -> None:
    policy = trainer(folder, micro_batch_tokens=16)
    batch = on_policy(policy, shares(*[(2, 12)] * 4))
    batch.behavior_logprobs[30] -= math.log(9.0)  # a loss token of the third rollout
    metrics = policy.step(batch, 0)
    assert metrics["num_microbatches"] == 4
    assert metrics["importance_max"] == pytest.approx(9, rel=1e-4)
    assert metrics["importance_mean"] == pytest.approx((47 + 9) / 48, rel=1e-4)
    assert metrics["importance_capped_share"] == pytest.approx(1 / 48)


def test_nan_off_the_mask_changes_nothing(folder: Path) -> None:
    batch = shares((5, 20), (2, 5))
    batch.loss_mask[10:14] = False  # what a tool says between two turns
    clean = trainer(folder).step(batch, 0)
    batch.behavior_logprobs[~batch.loss_mask] = math.nan
    other = trainer(folder).step(batch, 0)
    assert clean["tokens"] == 21 and {"entropy", "kl_behavior_proximal", "importance_mean"} <= clean.keys()
    for name in (*MEANS, "loss", "grad_norm", "tokens"):
        assert other.get(name) == clean.get(name), name


def test_sequence_with_advantage_zero_is_not_computed_but_divides(folder: Path) -> None:
    batch = shares((5, 20), (5, 30), advantages=[1.0, 0.0])
    metrics = trainer(folder).step(batch, 0)
    alone = trainer(folder).step(shares((5, 20), advantages=[1.0]), 0)
    assert (metrics["tokens"], metrics["computed_tokens"], metrics["input_tokens"]) == (50, 20, 24)
    assert metrics["grad_norm"] == pytest.approx(alone["grad_norm"] * 20 / 50, rel=1e-5)


@pytest.mark.parametrize("lengths", [(), ((4, 0), (3, 0))])
def test_a_batch_without_loss_tokens_takes_no_step(folder: Path, lengths: tuple[tuple[int, int], ...]) -> None:
    policy = trainer(folder)
    before = weights(policy)
    metrics = policy.step(shares(*lengths), 0)
    assert (metrics["empty_steps"], metrics["optimizer_steps"], metrics["loss"], policy.num_steps) == (1, 0, 0, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.models.named_parameters().items())


def test_non_finite_loss_stops_before_the_optimizer_and_names_the_tickets(folder: Path) -> None:
    policy = trainer(folder, micro_batch_tokens=32)
    before = weights(policy)
    batch = shares((2, 20), (2, 20), (2, 20))
    batch.behavior_logprobs[30] = math.nan
    with pytest.raises(RuntimeError, match=r"non-finite loss while training version 5: .* tickets \[1\]"):
        policy.step(batch, 5)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.models.named_parameters().items())
    assert policy.num_steps == 0


def test_non_finite_gradient_of_a_finite_loss_names_the_tickets(folder: Path) -> None:
    def infinite_slope(rows: Rows) -> torch.Tensor:
        """Where the advantage is 2: the square root of 0, which is finite and has no slope."""
        apart = (rows.current - rows.current.detach()).abs() if rows.advantages[0] == 2 else rows.current.exp()
        return apart.sqrt()

    policy = trainer(folder, objective=made_up(infinite_slope), micro_batch_tokens=32)
    with pytest.raises(RuntimeError, match=r"gradient norm nan .* tickets \[1\]"):
        policy.step(shares((2, 20), (2, 20), (2, 20), advantages=[1, 2, 1]), 0)


@pytest.mark.parametrize("passes", [{}, {"num_minibatches": 2, "num_epochs": 3}])
def test_learning_rate_warms_up_over_batches_however_many_optimizer_steps_each_has(folder: Path, passes: dict) -> None:
    policy = trainer(folder, learning_rate=0.1, warmup_steps=4, **passes)
    assert [policy.step(shares((2, 5)), n)["learning_rate"] for n in range(5)] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1]
    )
    assert warmed_up(1.0, 0, 0) == 1.0


def test_norm_reported_is_before_clipping_and_clipping_scales_all(folder: Path) -> None:
    batch = shares((2, 20), (3, 8))
    free, clipped = trainer(folder), trainer(folder, grad_clip=1e-4)
    assert free.step(batch, 0)["grad_norm"] == clipped.step(batch, 0)["grad_norm"] > 1e-4
    moments = [
        p.optimizer.state[p.model.get_input_embeddings().weight]["exp_avg"].norm().item() for p in (free, clipped)
    ]
    norm = trainer(folder).step(batch, 0)["grad_norm"]
    assert moments[1] / moments[0] == pytest.approx(1e-4 / norm, rel=1e-4)


def test_gradient_norm_is_summed_in_float64() -> None:
    ranks = TrainerRanks(group=None, device=CPU)
    gradients = [torch.full((3,), 1e30), torch.full((1,), 2e30), torch.empty(0)]  # squares beyond float32
    assert square_sum(gradients, ranks).sqrt().item() == pytest.approx(7**0.5 * 1e30, rel=1e-6)


def test_learning_rate_zero_changes_nothing(folder: Path) -> None:
    policy = trainer(folder, learning_rate=0.0)
    before = weights(policy)
    policy.step(shares((2, 20), (3, 8)), 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.models.named_parameters().items())


def test_step_makes_good_tokens_likelier_and_bad_ones_rarer(folder: Path) -> None:
    policy = trainer(folder)
    batch = on_policy(policy, shares((4, 20), (4, 20), advantages=[1, -1]))
    before = [policy.score(batch.token_ids[:24])[4:].sum(), policy.score(batch.token_ids[24:])[4:].sum()]
    policy.step(batch, 0)
    after = [policy.score(batch.token_ids[:24])[4:].sum(), policy.score(batch.token_ids[24:])[4:].sum()]
    assert after[0] > before[0]
    assert after[1] < before[1]


def grouped(*sizes: tuple[int, int, Sequence[int]]) -> Packed:
    """Groups as (prompt tokens, members whose reply begins like the prompt's last token's, tokens of each reply)."""
    random, rollouts = np.random.default_rng(3), []
    for group, (num_prompt, alike, replies) in enumerate(sizes):
        prompt, begin = random.integers(3, 60, num_prompt), random.integers(3, 60, alike)
        for num in replies:
            reply = np.r_[begin, random.integers(3, 60, num)]
            one = Rollout(env="e", task_id="t", ticket=len(rollouts), group_id=group)
            one.append(prompt)
            one.append(reply, random.normal(-4, 0.3, len(reply)), np.zeros(len(reply)))
            rollouts.append(one)
    return pack(rollouts, random.normal(size=len(rollouts)))


@pytest.mark.parametrize("micro_batch_tokens", [100_000, 60])
@pytest.mark.parametrize("kind", ["plain", "critic of turns", "recomputed"])
def test_shared_prompts_change_neither_log_probs_nor_loss_nor_gradient(
    folder: Path, micro_batch_tokens: int, kind: str
) -> None:
    batch = grouped((30, 0, [4, 9, 1]), (12, 2, [5, 5]), (20, 0, [7]))
    seen: list[dict[int, torch.Tensor]] = []

    def watching(rows: Rows, limits: Limits) -> TokenLosses:
        for i in rows.sequence.unique():
            mine = rows.sequence == i
            seen[-1][float(rows.behavior[mine][0])] = rows.current[mine].detach()
        return LOSSES["decoupled"](rows, limits)

    def made(**settings: object) -> Trainer:
        seen.append({})
        if kind == "critic of turns":
            settings |= {"critic": load(folder), "credit": Credit(level="turn")}
        if kind == "recomputed":
            settings["activation_checkpointing"] = True
        return trainer(folder, objective=Objective(loss=watching), learning_rate=1e-4, **settings)

    plain = made()
    expected = plain.step(batch, 0)
    shared = made(share_prefix=True, micro_batch_tokens=micro_batch_tokens)
    found = shared.step(batch, 0)
    assert expected["shared_tokens"] == 0 < found["shared_tokens"]
    assert found["input_tokens"] + found["shared_tokens"] == expected["input_tokens"]
    if micro_batch_tokens > 60:
        assert found["shared_tokens"] == 2 * 30 + 14
    for name in ("loss", "grad_norm", "entropy", "tokens"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert seen[0].keys() == seen[1].keys() and len(seen[0]) == 6
    for key, logprobs in seen[0].items():
        torch.testing.assert_close(seen[1][key], logprobs, rtol=0, atol=1e-5)
    others = dict(shared.models.named_trained())
    for name, parameter in plain.models.named_trained():
        moments = (t.optimizer.state[p]["exp_avg"] for t, p in ((shared, others[name]), (plain, parameter)))
        torch.testing.assert_close(*moments, rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_changes_nothing(folder: Path) -> None:
    batch = shares((5, 20), (2, 5), (9, 14))
    plain = trainer(folder, micro_batch_tokens=32).step(batch, 0)
    again = trainer(folder, micro_batch_tokens=32, activation_checkpointing=True).step(batch, 0)
    assert again["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-6)


def test_score_equals_transformers(folder: Path) -> None:
    policy = trainer(folder, temperature=0.5)
    ids = np.arange(3, 40, dtype=np.int32)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logprobs = plain(input_ids=torch.from_numpy(ids).long()[None]).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0].numpy()
    scores = policy.score(ids)
    assert (scores.dtype, scores[0]) == (np.float32, 0.0)
    assert scores[1:] == pytest.approx(expected, abs=1e-5)
    assert policy.score(ids[:1]).tolist() == [0.0]
    assert policy.score(ids[:0]).shape == (0,)


def test_exported_folder_is_what_transformers_loads(folder: Path, tmp_path: Path) -> None:
    policy = trainer(folder)
    policy.step(shares((4, 20), (4, 20)), 0)
    for _ in range(2):  # the second replaces the first
        policy.export(tmp_path / "model", folder)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in loaded.named_parameters():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, policy.models.named_parameters()[name]), name
    ids = np.arange(3, 40, dtype=np.int32)
    reread = trainer(tmp_path / "model")
    assert (reread.score(ids) == policy.score(ids)).all()
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert names == {file.name for file in folder.iterdir()} | {"SHA256SUMS"}


def test_an_exported_folder_is_verified_by_sha256sum(folder: Path, tmp_path: Path) -> None:
    trainer(folder).export(tmp_path / "first", folder)
    trainer(tmp_path / "first").export(tmp_path / "model", tmp_path / "first")
    verify = ["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"]
    subprocess.run(verify, cwd=tmp_path / "model", check=True)
    data = bytearray((tmp_path / "model" / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (tmp_path / "model" / "model.safetensors").write_bytes(data)
    verdict = subprocess.run(verify, cwd=tmp_path / "model", capture_output=True, text=True)
    assert (verdict.returncode, verdict.stdout) == (1, "model.safetensors: FAILED\n")


def test_state_of_step_zero_is_one_of_step_zero(folder: Path) -> None:
    batch = shares((4, 20), (4, 20))
    fresh, restored = trainer(folder), trainer(folder)
    restored.load_state_dict(trainer(folder).state_dict())
    fresh.step(batch, 0)
    restored.step(batch, 0)
    assert all(torch.equal(weights(fresh)[n], t) for n, t in restored.models.named_parameters().items())


def test_temperature_must_be_positive(folder: Path) -> None:
    with pytest.raises(ValueError, match="temperature"):
        trainer(folder, temperature=0.0)


@pytest.mark.parametrize(("temperature", "entropy"), [(1.0, 0.9475), (0.5, 0.4554), (1.5, 1.1526)])
def test_entropy_at_a_temperature(temperature: float, entropy: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert token_logprobs(logits, Head(weight=torch.eye(4)), torch.tensor([0]), temperature)[1].item() == pytest.approx(
        entropy, abs=5e-5
    )


def test_ratio_is_one_when_trained_at_the_temperature_of_sampling() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampled = (logits / 0.6).log_softmax(-1)
    every = torch.arange(4)
    for temperature, ratios in ((0.6, [1, 1, 1, 1]), (1.0, [0.79, 1.54, 3.01, 5.86])):
        trained, _ = token_logprobs(logits.expand(4, 4).contiguous(), Head(weight=torch.eye(4)), every, temperature)
        assert (trained - sampled).exp().tolist() == pytest.approx(ratios, abs=0.01)
    rows = Rows(current=sampled, proximal=sampled, behavior=sampled, advantages=torch.ones(4), sequence=every * 0)
    assert LOSSES["ppo"](rows, Limits()).ratio.max() == 1


def test_rejected_everything_takes_no_step_and_counts_as_empty(folder: Path) -> None:
    policy = trainer(
        folder,
        objective=Objective(loss=LOSSES["reinforce"], correction=Correction(reject="off_policy", reject_above=0.1)),
    )
    before = weights(policy)
    batch = on_policy(policy, shares((2, 5), (2, 7)))
    batch.behavior_logprobs[batch.loss_mask] += 1.0
    metrics = policy.step(batch, 0)
    assert (metrics["loss"], metrics["optimizer_steps"], metrics["empty_steps"], metrics["rejected_share"]) == (
        0,
        0,
        1,
        1,
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.models.named_parameters().items())


def test_rejected_sequences_leave_the_denominator(folder: Path) -> None:
    objective = Objective(loss=LOSSES["reinforce"], correction=Correction(reject="off_policy", reject_above=0.1))
    policy = trainer(folder, objective=objective)
    batch = on_policy(policy, shares((5, 20), (2, 10), advantages=[1, 1]))
    batch.behavior_logprobs[25:][batch.loss_mask[25:]] += 1.0
    alone = trainer(folder, objective=objective).step(select(batch, [0]), 0)
    both = policy.step(batch, 0)
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert both["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-6)
    assert both["rejected_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_micro_batches_change_no_aggregation(folder: Path, name: str) -> None:
    batch = shares((5, 20), (2, 1), (9, 14), (1, 30), (4, 7), advantages=[1, -1, 0.5, 0, 2])
    aggregation = partial(AGGREGATIONS[name], longest=64)
    whole = trainer(folder, aggregation=aggregation).step(batch, 0)
    cut = trainer(folder, aggregation=aggregation, micro_batch_tokens=32).step(batch, 0)
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-6)
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert whole["padding_share"] == 0


@pytest.mark.parametrize(
    ("objective", "computed"),
    [
        (Objective(loss=LOSSES["decoupled"]), 20),
        (Objective(loss=LOSSES["decoupled"], entropy_coefficient=0.01), 50),
        (Objective(loss=LOSSES["decoupled"], correction=Correction(reject="off_policy", reject_above=9.0)), 50),
    ],
    ids=["advantages alone", "entropy bonus", "reject"],
)
def test_tokens_are_of_the_batch_and_computed_ones_those_that_were(
    folder: Path, objective: Objective, computed: int
) -> None:
    batch = shares((5, 20), (5, 30), advantages=[1.0, 0.0])
    for num_epochs in (1, 2):
        metrics = trainer(folder, objective=objective, num_epochs=num_epochs).step(batch, 0)
        assert (metrics["tokens"], metrics["computed_tokens"], metrics["mismatch_tokens"]) == (50, computed, computed)
        assert metrics["input_tokens"] == num_epochs * (24 + (computed == 50) * 34)


def test_reference_is_the_model_as_it_was_at_the_same_temperature(folder: Path) -> None:
    objective = Objective(loss=LOSSES["decoupled"], kl="k2", kl_coefficient=0.5)
    policy = trainer(folder, objective=objective, reference=load(folder), temperature=0.7)
    batch = shares((5, 20), (2, 9), advantages=[1, 0])
    first = policy.step(batch, 0)
    assert first["kl_reference"] == 0
    assert first["computed_tokens"] == 29  # the sequence without an advantage is held to the reference, too
    second = policy.step(batch, 1)
    moved = [
        token_logprobs(hidden_states(model, ids[:-1], [0, 24]), head(model), ids[1:], temperature=0.7)[0][4:].detach()
        for ids in [torch.from_numpy(batch.token_ids[:25]).long()]
        for model in (policy.model, load(folder))
    ]
    assert second["kl_reference"] > 0
    third = policy.step(select(batch, [0]), 2)
    assert third["kl_reference"] == pytest.approx(((moved[0] - moved[1]).square() / 2).mean().item(), rel=1e-3)


def test_entropy_bonus_raises_the_entropy(folder: Path) -> None:
    batch = shares((5, 20), advantages=[0.0])
    plain = trainer(folder, objective=Objective(loss=LOSSES["decoupled"]))
    bonus = trainer(folder, objective=Objective(loss=LOSSES["decoupled"], entropy_coefficient=1.0))
    assert plain.step(batch, 0)["grad_norm"] == 0
    before, after = bonus.step(batch, 0), bonus.step(batch, 1)
    assert before["loss"] == pytest.approx(-before["entropy"], rel=1e-6)
    assert after["entropy"] > before["entropy"]


def test_interpolated_proximal_needs_no_forward_and_starts_at_ratio_one(folder: Path) -> None:
    seen: list[float] = []

    def watching(rows: Rows, limits: Limits) -> TokenLosses:
        seen.append(float((rows.current.detach() - rows.proximal).abs().max()))
        return LOSSES["decoupled"](rows, limits)

    batch = shares((5, 20), (2, 5), (9, 14), (3, 30), version=4)
    batch.minibatch[:] = [0, 0, 1, 1]
    policy = trainer(
        folder, objective=Objective(loss=watching), num_minibatches=2, interpolate_proximal=True, learning_rate=1e-2
    )
    calls = []
    policy.models.policy.register_forward_hook(lambda *_: calls.append(1))
    policy.step(on_policy(policy, batch), 5)
    assert seen[0] == 0.0
    assert seen[1] > 0
    assert len(calls) == 4 + 2  # the scores of on_policy, then one forward for each minibatch


@pytest.mark.parametrize("body", ["shared", "own"])
def test_critic_learns_the_reward_and_its_policy_follows_the_better_half(folder: Path, body: str) -> None:
    kind = {"shared_critic": True} if body == "shared" else {"critic": load(folder)}
    policy = trainer(
        folder, **kind, credit=Credit(clip=10.0), critic_learning_rate=1e-2, learning_rate=1e-4, micro_batch_tokens=32
    )
    batch = on_policy(policy, shares((4, 20), (4, 20), advantages=[1, -1]))
    before = [policy.score(ids)[4:].sum() for ids in np.split(batch.token_ids, 2)]
    metrics = [policy.step(batch, n) for n in range(12)]
    after = [policy.score(ids)[4:].sum() for ids in np.split(batch.token_ids, 2)]
    assert metrics[0]["value_mean"] == 0
    squares = sum(0.95 ** (2 * k) for k in range(20)) / 20  # |return| = 0.95^k, k tokens before the end
    assert metrics[0]["value_loss"] == pytest.approx(0.5 * squares / 2, rel=1e-5)
    assert metrics[-1]["value_loss"] < metrics[0]["value_loss"] / 2
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert not any("value" in name for name in policy.models.named_parameters())
    assert set(policy.state_dict()) == {
        "model",
        "optimizer",
        "num_steps",
        "value_head" if body == "shared" else "critic",
    }


@pytest.mark.parametrize("body", ["shared", "own"])
def test_a_kl_in_the_rewards_of_a_critic_is_that_of_the_start_of_the_batch(folder: Path, body: str) -> None:
    kind = {"shared_critic": True} if body == "shared" else {"critic": load(folder)}
    seen: list[Rows] = []

    def watching(rows: Rows, limits: Limits) -> TokenLosses:
        seen.append(rows)
        return LOSSES["reinforce"](rows, limits)

    policy = trainer(
        folder,
        **kind,
        objective=Objective(loss=watching, kl="k1"),
        reference=load(folder),
        credit=Credit(lam=1.0, kl_coefficient=0.5),
        critic_learning_rate=0.0,
        learning_rate=1e-2,
    )
    batch = shares((5, 6), advantages=[0.0])  # no reward but the KL
    policy.step(batch, 0)
    assert seen[-1].advantages.abs().max() == 0  # the policy is the reference
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    kl = policy.score(batch.token_ids)[5:] - trainer(folder).score(batch.token_ids)[5:]
    metrics = policy.step(batch, 1)
    to_go = -0.5 * kl[::-1].cumsum()[::-1]
    expected = (to_go - to_go.mean()) / to_go.std()
    assert seen[-1].advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-3)
    assert metrics["kl_reference"] == pytest.approx(kl.mean(), rel=1e-4)


def test_a_kl_in_the_rewards_is_standardized_with_them_over_all_tokens_of_the_batch(folder: Path) -> None:
    """REINFORCE++: A_t = R - β Σ_later k1 at the start of the batch, to mean 0 and standard deviation 1."""
    seen: dict[int, np.ndarray] = {}

    def watching(rows: Rows, limits: Limits) -> TokenLosses:
        seen.setdefault(len(rows.advantages), rows.advantages.numpy().copy())
        assert (seen[len(rows.advantages)] == rows.advantages.numpy()).all()  # in both epochs
        return LOSSES["reinforce"](rows, limits)

    policy = trainer(
        folder,
        objective=Objective(loss=watching),
        reference=load(folder),
        penalty=0.5,
        num_minibatches=2,
        num_epochs=2,
        micro_batch_tokens=16,
        learning_rate=1e-2,
    )
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    batch = shares((5, 6), (3, 10), (4, 20), advantages=[0.0, 1.0, 2.0])
    batch.minibatch[:] = [0, 0, 1]
    expected = []
    for i, (a, b) in enumerate(itertools.pairwise(batch.cu_seqlens)):
        ids, mask = batch.token_ids[a:b], batch.loss_mask[a:b]
        kl = (policy.score(ids) - trainer(folder).score(ids))[mask]
        expected.append(batch.advantage[i] - 0.5 * kl[::-1].cumsum()[::-1])
    policy.step(batch, 0)
    every = np.concatenate(expected)
    for mine in expected:
        assert seen[len(mine)] == pytest.approx((mine - every.mean()) / every.std(), abs=1e-3)


def test_policy_and_critic_are_clipped_each_by_its_own_norm(folder: Path) -> None:
    def made(**settings: object) -> Trainer:
        credit = Credit(coefficient=1e-3, clip=10.0)
        return trainer(folder, **settings, credit=credit, critic_learning_rate=1e-4, learning_rate=1e-4)

    def moment(policy: Trainer, module: torch.nn.Module) -> float:
        squares = (policy.optimizer.state[p]["exp_avg"].double().square().sum().item() for p in module.parameters())
        return math.sqrt(sum(squares)) / 0.1  # 1 - β of the first step

    batch = shares((4, 20), (4, 20), advantages=[1, -1])
    free, clipped = made(critic=load(folder)), made(critic=load(folder), grad_clip=0.01)
    metrics = free.step(batch, 0)
    assert metrics["grad_norm"] > 10 * metrics["critic_grad_norm"] > 0
    assert moment(free, free.models.critic) == pytest.approx(metrics["critic_grad_norm"], rel=1e-5)
    again = clipped.step(batch, 0)
    assert {k: again[k] for k in ("grad_norm", "critic_grad_norm")} == {
        k: metrics[k] for k in ("grad_norm", "critic_grad_norm")
    }
    assert moment(clipped, clipped.models.policy) == pytest.approx(0.01, rel=1e-5)
    assert moment(clipped, clipped.models.critic) == pytest.approx(min(0.01, metrics["critic_grad_norm"]), rel=1e-5)
    assert "critic_grad_norm" not in made(shared_critic=True).step(batch, 0)


def test_a_critic_needs_to_be_told_how_to_credit(folder: Path) -> None:
    with pytest.raises(ValueError, match="credit"):
        trainer(folder, shared_critic=True)


def test_non_finite_weights_stop_before_the_optimizer(folder: Path) -> None:
    policy = trainer(folder)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[0, 0] = math.inf  # of a token that no rollout has
    with pytest.raises(RuntimeError, match="non-finite weights in version 3"):
        policy.step(shares((2, 20)), 3)


def test_step_reports_its_use_of_the_machine(folder: Path) -> None:
    metrics = trainer(folder).step(shares((5, 20), (2, 30)), 0)
    assert 0 < metrics["peak_s"] < 10
    assert metrics["peak_memory_bytes"] > 1e8
    assert metrics["padding_share"] == 0


def test_percentiles_are_of_all_tokens(folder: Path) -> None:
    policy = trainer(folder, micro_batch_tokens=32)
    batch = on_policy(policy, shares((2, 25), (2, 25), (2, 25), (2, 25)))
    for i, loss_tokens in enumerate(np.split(np.flatnonzero(batch.loss_mask), 4)):
        batch.behavior_logprobs[loss_tokens] -= math.log([4.0, 0.5, 1.0, 1.0][i])
    batch.behavior_logprobs[np.flatnonzero(batch.loss_mask)[0]] -= math.log(2.0)
    metrics = policy.step(batch, 0)
    assert metrics["importance_p1"] == pytest.approx(0.5, rel=0.02)
    assert metrics["importance_p50"] == pytest.approx(1.0, rel=0.02)
    assert metrics["importance_p99"] == pytest.approx(4.0, rel=0.02)
    assert metrics["importance_max"] == pytest.approx(8.0, rel=1e-3)
