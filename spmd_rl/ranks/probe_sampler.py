"""An engine's half of the probe: sequences sampled in the way that training samples, and scored once more whole.

Given the engine's thread, the sampling of the run and how text becomes tokens.  `at_start` does all that happens to a
sequence: several replies to one prompt, a prompt longer than what a step computes of prompts, one of two tokens, and
weights that are swapped while replies run.  `at` samples one sequence that lives through the swap to a version.
Knows nothing of trainers, nor of what the tokens are compared with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from spmd_rl.engine.thread import EngineThread
from spmd_rl.engine.update import DISTURBED, disturbed
from spmd_rl.ranks.episodes import seed_of
from spmd_rl.types import Completion, Finish, Rollout, Sampling

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 24  # sampled for each sequence, at most
PROMPT = 40  # tokens of an ordinary prompt, at most
SHORT = 2  # tokens of the short one
LONG = 640  # of the long one, at least, where the context has room for it
REPLIES = 3  # to the ordinary prompt, and two more that live through a swap
CROSSING = 2
BEFORE_SWAP = 6  # steps that a running sequence makes before weights are swapped
TEXT = (
    "The harbour office opens at 7. By 9 the first 12 boats are back, and the cranes lift 340 crates of mackerel, "
    "85 of crab and a few of squid onto the quay; at noon, when the tide turns, all of it is on its way inland. "
    "A clerk writes down x = 3 * (4 + 5) and asks: how many crates are left if each of 27 carts takes 15? "
)
"""Something to go on from: letters, digits and marks that most tokenizers know."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """What an engine sampled at one version."""

    rollouts: list[Rollout]  # members of one group share a prompt
    scores: np.ndarray  # [T] float32, of all their tokens: by the engine's own forward, at temperature 1; 0 = first
    choices: np.ndarray  # [T, layers · k] int16, experts of each token in that forward; [., 0] where they are not known
    num_tokens: int  # that it cost, in the engine's count


class ProbeSampler:
    """One engine's; belongs to the event loop of its thread."""

    def __init__(
        self,
        *,
        engine: EngineThread,
        sampling: Sampling,  # of training
        encode: Callable[[str], np.ndarray],
        max_seq_len: int,
        distances: Sequence[int] = (),  # of the model, see `model.distances`: the long prompt goes beyond
        recomputes: bool,  # keys and values of running sequences, under new weights
        seed: int,
    ) -> None:
        self._engine, self._recomputes, self._seed = engine, recomputes, seed
        self._max_seq_len, self._distances = max_seq_len, distances
        self._num_new = max(1, min(TOKENS, max_seq_len // 3))
        self._sampling = replace(sampling, max_tokens=self._num_new, stop_ids=())
        self._text = np.array(encode(TEXT), np.int32)
        if not len(self._text):  # a vocabulary without Latin letters
            self._text = np.zeros(1, np.int32)
        self._num_tokens = 0  # sampled since the last sample was handed out
        self._num_asked = 0

    async def at_start(self, weights: Callable[[], Mapping[str, Tensor]]) -> Sample:
        """In full, at the version of now, whose `weights` these are.  Nothing else may load any meanwhile."""
        version = self._engine.version
        short, long = self._prompt(SHORT, shift=1), self._prompt(self._longest, shift=2)
        prompts = [self._prompt(PROMPT)] * REPLIES + [long, short]
        groups = [0] * REPLIES + [1, 2]
        completions = list(await asyncio.gather(*(self._generate(prompt) for prompt in prompts)))
        if self._recomputes:
            await self._swap(lambda: disturbed(weights()), DISTURBED)
        prompts += prompts[:CROSSING]
        groups += groups[:CROSSING]
        running = [asyncio.ensure_future(self._generate(prompt)) for prompt in prompts[-CROSSING:]]
        await asyncio.sleep(0)  # they are submitted
        await self._swap(weights, version, after=BEFORE_SWAP)
        completions += [await one for one in running]
        return await self._sample(prompts, groups, completions)

    async def at(self, version: int) -> Sample:
        """In small: what ends at `version`, which is swapped in meanwhile or was, and is not left before the return.

        Without recomputing what lived through a swap is exact of no version: it comes beside one that begins after.
        """
        prompt, kept = self._prompt(PROMPT, shift=self._num_asked), []
        while True:
            completion = await self._generate(prompt)
            if completion.versions[-1] == version:
                kept.append(completion)
            whole = self._recomputes or completion.versions[0] == version
            if kept and whole:
                break
        return await self._sample([prompt] * len(kept), [0] * len(kept), kept)

    @property
    def _longest(self) -> int:
        """More than a step computes of prompts and than the model's windows, as far as the context has room for it."""
        room = self._max_seq_len - self._num_new
        wanted = [size * 5 // 4 for size in (self._engine.engine.prefill_budget, *self._distances)]
        return max([min(room, LONG), *(length for length in wanted if length <= room)])

    def _prompt(self, length: int, shift: int = 0) -> np.ndarray:  # [N] int32
        """From another place of the text for another shift."""
        length = max(1, min(length, self._max_seq_len - self._num_new))
        return np.resize(np.roll(self._text, -7 * shift), length)

    async def _generate(self, prompt: np.ndarray) -> Completion:
        seed = seed_of(self._seed, "probe", self._num_asked)
        self._num_asked += 1
        completion, wasted = await self._engine.generate(prompt, replace(self._sampling, seed=seed))
        self._num_tokens += len(completion.token_ids) + wasted
        return completion

    async def _swap(self, weights: Callable[[], Mapping[str, Tensor]], version: int, *, after: int = 0) -> None:
        loop, swapped = asyncio.get_running_loop(), asyncio.Event()

        def loaded(pause_s: float) -> None:
            loop.call_soon_threadsafe(swapped.set)

        self._engine.load(weights, version, loaded, after=after, is_update=False)
        await swapped.wait()

    async def _sample(
        self, prompts: Sequence[np.ndarray], groups: Sequence[int], completions: Sequence[Completion]
    ) -> Sample:
        rollouts = []
        for ticket, (prompt, group, completion) in enumerate(zip(prompts, groups, completions, strict=True)):
            rollout = Rollout(env="probe", task_id=str(group), group_id=group, ticket=ticket, purpose="probe")
            rollout.finish_reason = Finish.LENGTH
            rollout.append(prompt)
            rollout.append(completion.token_ids, completion.logprobs, completion.versions)
            rollouts.append(rollout)
        scored = [await self._engine.score(rollout.token_ids) for rollout in rollouts]
        scores, choices = map(np.concatenate, zip(*scored, strict=True))
        num_tokens, self._num_tokens = self._num_tokens, 0
        return Sample(rollouts=rollouts, scores=scores, choices=choices, num_tokens=num_tokens)
