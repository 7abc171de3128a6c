"""What a probe measures, and where the limits are."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import Llama4TextConfig, LlamaConfig, MistralConfig

from spmd_rl.config.age_bound import age_bound
from spmd_rl.metrics.probe import (
    Limits,
    Sampled,
    Scored,
    assert_agreed,
    check_mismatch,
    compare,
    together,
    whole_context,
)
from spmd_rl.metrics.report import Report
from spmd_rl.model.causal_lm import distances
from spmd_rl.packing import packing
from spmd_rl.ranks.probe_sampler import ProbeSampler
from spmd_rl.types import Disagreement, Rollout, Sampling
from tests import fakes

EXACT, ROUNDED, EXPERTS = Limits(exact=True), Limits(), Limits(exact=True, experts=True)
VERSIONS = [[7, 7, 7], [6, 7, 7], [6, 6, 6]]  # of three sequences of three sampled tokens


def packed(versions: list[list[int]] = VERSIONS) -> packing.Packed:
    rollouts = [Rollout(env="probe", task_id="", ticket=ticket) for ticket in range(len(versions))]
    for rollout, own in zip(rollouts, versions, strict=True):
        rollout.append(np.array([1, 2]))
        rollout.append(np.arange(len(own)), np.full(len(own), -1.0), np.array(own))
    return packing.pack(rollouts)


def halves(*differences: float, forwards: float = 0.0, alone: float = 0.0) -> tuple[Sampled, Scored]:
    """Trainers find sampled tokens that much likelier than engines did, as in the engine's forward and alone."""
    share = packed()
    scores = np.full(15, -1.0, np.float32)
    trained = scores.copy()
    trained[share.loss_mask] += np.array(differences, np.float32)
    sampled = Sampled(rank=2, packed=share, scores=scores)
    return sampled, Scored(packed=trained, alone=trained + np.float32(alone), plain=scores + np.float32(forwards))


def measured(*differences: float, limits: Limits = EXACT, recomputes: bool = True, **more: float) -> dict[str, float]:
    sampled, scored = halves(*differences, **more)
    return compare(sampled, [scored], version=7, limits=limits, recomputes=recomputes)


def test_tokens_count_whose_whole_context_the_version_has_computed():
    share, mask = packed(), packed().loss_mask
    assert whole_context(share, 7, recomputes=True)[mask].tolist() == [True] * 3 + [False, True, True] + [False] * 3
    assert whole_context(share, 7, recomputes=False)[mask].tolist() == [True] * 3 + [False] * 6
    assert not whole_context(share, 7, recomputes=True)[~mask].any()


def test_the_worst_trainer_is_told_and_tokens_of_other_versions_are_left_out():
    sampled, scored = halves(0.0, 0.5, 0.0, 9.0, -1.0, 0.0, 9.0, 9.0, 9.0, forwards=0.25, alone=0.125)
    _, other = halves(*[0.0] * 9)
    values = compare(sampled, [other, scored, other], version=7, limits=ROUNDED, recomputes=True)
    assert values == {
        "probe/tokens": 5,
        "probe/sampled_max": 1.0,
        "probe/sampled_kl": pytest.approx((math.exp(0.5) - 1.5 + math.exp(-1.0)) / 5),
        "probe/far": 2,
        "probe/max_difference": 0.25,
        "probe/kl": pytest.approx(math.exp(0.25) - 1.25),
        "probe/packed_max": 0.125,
    }


def test_what_lived_through_a_swap_without_being_recomputed_is_only_reported():
    values = measured(*[0.0] * 4, 0.5, 0.0, *[0.0] * 3, recomputes=False)
    assert (values["probe/tokens"], values["probe/sampled_max"]) == (3, 0.0)
    assert values["probe/kept_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert_agreed(values, rank=2, version=7, limits=EXACT)


def test_tokens_that_were_sent_to_other_experts_are_counted_but_for_the_last_of_a_sequence():
    sampled, scored = halves(*[0.0] * 9)
    here = np.tile(np.array([0, 3, 1, 2], np.int16), (15, 1))  # two of four experts in two layers
    there = here.copy()
    there[3], there[7, :2], there[4] = [0, 3, 0, 2], [1, 2], -1
    sampled, scored = replace(sampled, choices=here), replace(scored, choices=there)
    assert compare(sampled, [scored], version=7, limits=EXPERTS, recomputes=True)["probe/flips"] == 2
    assert "probe/flips" not in measured(*[0.0] * 9)


def test_a_probe_without_a_token_of_its_version_proves_nothing():
    sampled, scored = halves(*[0.0] * 9)
    with pytest.raises(RuntimeError, match="the engine of rank 2 sampled no token for the probe of version 8"):
        compare(sampled, [scored], version=8, limits=EXACT, recomputes=True)


@pytest.mark.parametrize(
    ("differences", "more", "limits", "said"),
    [
        ([0.0011], {}, EXACT, "rank 2 does not sample from the model that is trained: at version 7 .* up to 0.0011"),
        ([0.0011], {}, EXACT, "where float32 allows 0.001: its forward over the whole sequence agrees"),
        ([math.nan], {}, EXACT, "by up to nan where"),
        ([0.5], {"alone": 0.5}, EXACT, "sequences see each other"),
        ([0.5], {"forwards": 0.5}, EXACT, "wrong weights in the engine of rank 2: at version 7 .* up to 0.5"),
        ([3.0], {}, ROUNDED, "by 3.22 nats per token, the limit is 0.5"),
        ([math.nan], {}, ROUNDED, "by nan nats per token"),
    ],
)
def test_what_breaks_a_limit_is_one_line_with_rank_version_value_limit_and_cause(differences, more, limits, said):
    values = measured(*differences, *[0.0] * 8, limits=limits, **more)
    with pytest.raises(Disagreement, match=said) as seen:
        assert_agreed(values, rank=2, version=7, limits=limits)
    assert len(str(seen.value).splitlines()) == 1


@pytest.mark.parametrize(("difference", "limits"), [(0.0009, EXACT), (-1.5, ROUNDED)])
def test_what_rounding_makes_is_no_disagreement(difference, limits):
    assert_agreed(measured(difference, *[0.0] * 8, limits=limits), rank=2, version=7, limits=limits)


def test_where_tokens_are_routed_to_experts_one_in_a_hundred_may_be_routed_otherwise():
    one, two = np.zeros(200), np.zeros(200)
    one[:2], two[:3] = 2.0, 2.0
    assert (EXPERTS.largest(one), EXPERTS.largest(two), EXACT.largest(one)) == (0.0, 2.0, 2.0)
    assert "the 99th percentile of tokens 2 where float32 allows 0.001" in EXPERTS.broken(2.0, 0.0)


def test_several_comparisons_are_told_as_the_worst_of_each_number():
    assert together([{"a": 1.0, "b": 2.0}, {"a": 3.0, "c": 0.0}]) == {"a": 3.0, "b": 2.0, "c": 0.0}
    for order in ([1e-6, np.nan, 2e-6], [np.nan, 1e-6], [1e-6, np.nan]):  # whichever trainer has it
        assert np.isnan(together([{"a": value} for value in order])["a"])


@pytest.mark.parametrize(
    ("values", "limits", "said"),
    [
        ({"trainer/mismatch_kl": 1e-9, "trainer/mismatch_max": 0.0011}, EXACT, "up to 0.0011 where float32 allows"),
        ({"trainer/mismatch_kl": 0.51, "trainer/mismatch_max": 3.0}, ROUNDED, "0.51 nats per token, the limit is 0.5"),
        ({"trainer/mismatch_kl": 0.51, "trainer/mismatch_p99": 0.0}, EXPERTS, "0.51 nats per token, the limit is 0.5"),
        (
            {"trainer/mismatch_kl": 1e-3, "trainer/mismatch_p99": 0.9},
            EXPERTS,
            "the 99th percentile of tokens 0.9 where",
        ),
        ({"trainer/mismatch_kl": np.nan, "trainer/mismatch_max": 0.0}, EXACT, "nan nats per token, the limit is 0.5"),
    ],
)
def test_tokens_of_a_batch_that_the_trained_version_sampled_have_the_same_limits(values, limits, said):
    with pytest.raises(Disagreement, match=f"training version 7: .* {said}"):
        check_mismatch(values, version=7, limits=limits)
    sound = {"trainer/mismatch_kl": 1e-9, "trainer/mismatch_max": 0.0009, "trainer/mismatch_p99": 0.0009}
    check_mismatch(sound, version=7, limits=limits)
    check_mismatch({}, version=7, limits=limits)


def report(said: list[str]) -> Report:
    bound = age_bound(gate="admission", order="admission", max_staleness=1, batch_size=4, group_size=1)
    return Report(steps=9, knobs=fakes.knobs(), slots=4, bound=bound, decode=lambda ids: "", say=said.append)


def test_a_large_mismatch_is_warned_of_and_told_again_only_when_it_grows():
    said: list[str] = []
    of = report(said)
    for version, kl in enumerate((0.009, 0.011, 0.010, 0.012)):
        of.probed(version, {"probe/kl": 0.0, "probe/sampled_kl": kl, "probe/cost_s": 0.0})
    of.probed(4, {"probe/kl": 0.013, "probe/sampled_kl": 0.0, "probe/cost_s": 0.0})
    assert [line.split(",")[0] for line in said] == [
        f"warning: at version {version} engines compute other log-probs than trainers" for version in (1, 3, 4)
    ]
    assert "by 0.011 nats per token" in said[0]


def test_a_large_mismatch_of_a_batch_is_warned_of():
    said: list[str] = []
    for kl in (None, 0.009, 0.011):
        report(said).mismatched(3, kl)
    (line,) = said
    assert line.startswith("warning: tokens that version 3 sampled") and "by 0.011 nats per token" in line


@pytest.mark.parametrize(
    ("room", "budget", "distances", "longest"),
    [
        (2000, 512, (), 640),
        (100, 512, (), 92),  # the context ends before
        (2000, 1024, (), 1280),
        (4000, 512, (1024, 2048), 2560),
        (2000, 512, (1024, 4096), 1280),  # no context of the run crosses the larger one
    ],
)
def test_the_long_prompt_goes_beyond_chunks_and_windows_that_a_context_can_cross(room, budget, distances, longest):
    sampler = ProbeSampler(
        engine=SimpleNamespace(engine=SimpleNamespace(prefill_budget=budget)),
        sampling=Sampling(max_tokens=8),
        encode=lambda text: [1, 2, 3],
        max_seq_len=room,
        distances=distances,
        recomputes=True,
        seed=0,
    )
    sampler._num_new = 8
    assert sampler._longest == longest


def test_the_distances_of_a_model_are_its_windows_chunks_and_original_length():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    assert distances(MistralConfig(sliding_window=4096)) == (4096,)
    assert distances(LlamaConfig(rope_parameters=rope)) == (1024,)
    assert distances(Llama4TextConfig(attention_chunk_size=8192))[-1] == 8192
    assert distances(LlamaConfig()) == ()
