"""The engine in plain torch, on the same transformers modules that the trainer uses.

Each step computes the next token of every running sequence and a bounded chunk of waiting prompts in one forward, then
samples for all rows at once; requests join and leave between steps.  Where layers carry states beside keys and values,
prompts are computed whole, each in a forward of its own.  A prompt submitted several times under the same weights is
computed once.  `load_weights` swaps weights between two steps; running sequences go on, their keys and values
recomputed under the new weights (or kept, by option), so a token's version is the one that sampled it.
Promises: a request's tokens depend on its seed, prompt and the weights, on its neighbours only by float rounding, and
with `deterministic` not at all; keys, values and states take no more memory than `kv_cache_bytes`, but for one layer of
some rows while their number changes.  Knows nothing of the orchestrator, environments or trainer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spmd_rl.engine.body import Body, Modules
from spmd_rl.engine.cache import Cache, Prefix, Sequence, Slab
from spmd_rl.engine.kv_room import KvRoom
from spmd_rl.engine.llama import LlamaBody
from spmd_rl.engine.sampling import Uniforms, check_request, sample
from spmd_rl.engine.states import Joined, States, clamp_time_steps, state_bytes
from spmd_rl.engine.step_attention import StepAttention
from spmd_rl.engine.stops import Decode, check_stop, completes_stop
from spmd_rl.engine.update import check_update, sampled_before
from spmd_rl.model.attention import Segments
from spmd_rl.model.causal_lm import packs
from spmd_rl.model.logprobs import token_logprobs
from spmd_rl.model.routes import NO_CHOICES, choices, expert_layers, sorted_choices
from spmd_rl.types import Completion, Sampling
from spmd_rl.weights.layout import manifest


class NativeEngine:
    """See `engine.protocol.Engine`.  Starts without weights: `load_weights` before the first step."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,  # from `model.build`; its parameters may be on the meta device
        device: torch.device,
        max_slots: int = 32,  # sequences computed at a time
        max_seq_len: int = 4096,  # prompt and completion, in tokens
        prefill_budget: int = 512,  # prompt tokens computed per step
        kv_on_update: str = "recompute",  # "recompute" | "keep"
        kv_cache_bytes: int = 0,  # for all keys and values; requests wait for room; 0: no bound but max_slots
        deterministic: bool = False,  # each sequence alone: bit-equal whatever else runs
        functional: bool = True,  # the short path for architectures that have one
        head_dtype: torch.dtype | None = None,  # of logits and the products that they are made of; None: the model's
        decode: Decode | None = None,  # for requests with stop strings
    ) -> None:
        if kv_on_update not in ("recompute", "keep"):
            raise ValueError(f"kv_on_update = {kv_on_update!r} is neither 'recompute' nor 'keep'")
        for name, value in (("max_slots", max_slots), ("max_seq_len", max_seq_len), ("prefill_budget", prefill_budget)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, is {value}")
        config = model.config.get_text_config()
        self.version = -1
        self.scored_choices = NO_CHOICES
        self._experts = expert_layers(model)
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_prefill_tokens = 0
        self._device = device
        self._specs = {spec.name: spec for spec in manifest(model)}
        self._vocab = config.vocab_size
        self._max_slots = max_slots
        self._num_lacking_kv = 0
        self._max_seq_len = max_seq_len
        self.prefill_budget = prefill_budget
        self._recompute = kv_on_update == "recompute"
        self._deterministic, self._decode = deterministic, decode
        short = functional and LlamaBody.fits(model)
        one_row = deterministic or max_slots == 1
        self._body: Body[Any] = (  # of what its own `prepare` gives
            LlamaBody(model, max_seq_len, device, one_row=one_row, head_dtype=head_dtype)
            if short
            else Modules(model, head_dtype)
        )
        self._joined = None if packs(model) else Joined()  # of a model whose layers carry states
        if self._joined is not None:
            clamp_time_steps(model)
        self._room = KvRoom.of(
            config,
            dtype=model.dtype,
            num_bytes=kv_cache_bytes,
            max_seq_len=max_seq_len,
            state_bytes=state_bytes(model, device) if self._joined is not None and kv_cache_bytes else 0,
        )
        self._cache = Cache(max_rows=max_slots, budget=self._room.total, state_tokens=self._room.state)
        self._no_rows = torch.empty(0, config.hidden_size, dtype=model.dtype, device=device)
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: dict[int, Sequence] = {}
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()  # by prompt; all under the loaded weights
        self._jobs: deque[Prefix] = deque()  # not yet complete, in order of service
        self._ready: deque[Prefix] = deque()  # complete or cached: what waits for them starts in this step
        self._cancelled: list[int] = []
        self._prepared: tuple[int, Mapping[str, Tensor], object] | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_lacking_kv(self) -> int:
        return self._num_lacking_kv

    @property
    def kv_used(self) -> float:
        held = sum(len(sequence.tokens) for sequence in list(self._running.values()))
        return held / min(self._max_slots * self._max_seq_len, self._room.total)

    @property
    def recomputes(self) -> bool:
        return self._recompute and sampled_before(self.version, (r.versions for r in self._running.values()))

    def submit(self, request_id: int, prompt: np.ndarray, sampling: Sampling) -> None:
        check_request(request_id, prompt, sampling, vocab=self._vocab, max_seq_len=self._max_seq_len)
        check_stop(request_id, sampling.stop, self._decode)
        if request_id in self._waiting or request_id in self._running:
            raise ValueError(f"request {request_id} is already in the engine")
        self._waiting[request_id] = Sequence(
            request_id=request_id,
            sampling=sampling,
            tokens=prompt.tolist(),
            num_prompt=len(prompt),
            uniforms=Uniforms(sampling.seed),
        )

    def cancel(self, request_id: int) -> None:
        if request_id in self._waiting or request_id in self._running:
            self._cancelled.append(request_id)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        ended = self._end_cancelled()
        self._admit()
        if not self._running:
            return ended
        if self.version < 0:
            raise RuntimeError("step() before load_weights()")
        for slab in self._cache.slabs():
            for sequence in list(slab.sequences):
                self._cache.make_room(sequence)
        decoding = [s for slab in self._cache.slabs() for s in slab.sequences]
        hidden = self._forward(self._cache.slabs(), self._next_chunks())  # [len(decoding), d]
        ended += self._sample(decoding, hidden)
        self.num_steps += 1
        return ended

    def prepare(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self._prepared = (version, tensors, self._checked(tensors))
        if self._device.type == "cuda":  # steps are computed on another thread's stream
            torch.cuda.current_stream(self._device).synchronize()

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] != version or prepared[1] is not tensors:
            weights = self._checked(tensors)
        else:
            weights = prepared[2]
        self._body.load(weights)
        self.version = version
        self._prefixes.clear()
        self._jobs.clear()
        unstarted = [s for s in self._running.values() if not s.logprobs]
        if self._recompute:
            self._recompute_all([s for s in self._running.values() if s.logprobs])
        for sequence in unstarted:
            self._queue_prompt(sequence)

    @torch.inference_mode()
    def score(self, token_ids: np.ndarray) -> np.ndarray:
        if not 0 < len(token_ids) <= self._max_seq_len:
            raise ValueError(f"score of {len(token_ids)} tokens, max_seq_len is {self._max_seq_len}")
        ids = torch.as_tensor(np.asarray(token_ids, np.int64), device=self._device)
        with choices(self._experts) as seen:
            hidden = self._body(ids, torch.arange(len(ids), device=self._device), Segments([0, len(ids)]))
        self.scored_choices = sorted_choices(seen, len(self._experts), len(ids))
        logprobs, _ = token_logprobs(hidden[:-1], self._body.head, ids[1:])
        return np.concatenate([np.zeros(1, np.float32), logprobs.cpu().numpy()])

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._prefixes.clear()
        self._jobs.clear()
        del self._cache, self._body

    def _checked(self, tensors: Mapping[str, Tensor]) -> object:
        """For the body to load."""
        check_update(tensors, self._specs, self._device)
        return self._body.prepare(tensors)

    # requests

    def _admit(self) -> None:
        """In order of arrival, while there are slots, and room for the longest rows that all may come to need."""
        reserved = sum(self._largest_row(s) for s in self._running.values())
        self._num_lacking_kv = 0
        while self._waiting and len(self._running) < self._max_slots:
            request_id, sequence = next(iter(self._waiting.items()))
            reserved += self._largest_row(sequence)
            if reserved > self._room.rows:
                self._num_lacking_kv = min(len(self._waiting), self._max_slots - len(self._running))
                break
            self._running[request_id] = self._waiting.pop(request_id)
            self._queue_prompt(sequence)

    def _largest_row(self, sequence: Sequence) -> int:
        """Tokens of the last row that it may come to need; those of its last token are never held."""
        return Cache.capacity(sequence.num_prompt + sequence.sampling.max_tokens - 1) + self._room.state

    def _queue_prompt(self, sequence: Sequence) -> None:
        prefix = self._prompt_prefix(sequence.tokens[: sequence.num_prompt])
        if prefix.last_hidden is not None and not prefix.waiting:
            self._ready.append(prefix)
        prefix.waiting.append(sequence)

    def _prompt_prefix(self, prompt: list[int]) -> Prefix:
        key = np.asarray(prompt, np.int32).tobytes()
        if key not in self._prefixes:
            self._prefixes[key] = Prefix(tokens=prompt)
            self._jobs.append(self._prefixes[key])
        self._prefixes.move_to_end(key)
        return self._prefixes[key]

    @torch.inference_mode()
    def _recompute_all(self, started: list[Sequence]) -> None:
        """Queue the tokens so far of every started sequence; what a group shares is computed once, but for states."""
        prompts = Counter(tuple(s.tokens[: s.num_prompt]) for s in started)
        self._cache.clear()
        if self._joined is not None:
            self._joined.clear()
        jobs = [Prefix(tokens=list(s.tokens), waiting=[s]) for s in started]
        for job, sequence in zip(jobs, started, strict=True):
            prompt = tuple(sequence.tokens[: sequence.num_prompt])
            if prompts[prompt] > 1 and not self._deterministic and self._joined is None:
                job.base = self._prompt_prefix(list(prompt))  # before all that wait for it
        self._jobs += jobs

    def _end_cancelled(self) -> list[tuple[int, Completion]]:
        ended = []
        for request_id in self._cancelled:
            sequence = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
            if sequence is None:  # cancelled twice
                continue
            self._cache.remove(sequence)
            for job in self._jobs:
                if sequence in job.waiting:
                    job.waiting.remove(sequence)
            ended.append((request_id, _completion(sequence, "cancelled")))
        if ended:
            needed = {id(job) for job in self._jobs if job.waiting}
            needed |= {id(job.base) for job in self._jobs if job.waiting and job.base is not None}
            self._jobs = deque(job for job in self._jobs if id(job) in needed)
            for key in [k for k, p in self._prefixes.items() if p.last_hidden is None and id(p) not in needed]:
                del self._prefixes[key]
        self._cancelled.clear()
        return ended

    def _trim_prefixes(self) -> None:
        held = sum(len(p.tokens) + self._room.state for p in self._prefixes.values())
        for key, prefix in list(self._prefixes.items()):
            if held <= self._room.kept:
                break
            if prefix.last_hidden is not None:
                held -= len(prefix.tokens) + self._room.state
                del self._prefixes[key]

    # one step

    def _next_chunks(self) -> list[tuple[Prefix, int, int]]:
        """At most `prefill_budget` tokens in all; deterministic: cut at the same places whatever else runs.

        Layers that carry states begin with a whole prefix: then at least one, and more while they fit.
        """
        chunks: list[tuple[Prefix, int, int]] = []
        budget = self.prefill_budget
        for job in self._jobs:
            if job.base is not None and job.base.last_hidden is None:
                break
            if not job.is_open:
                self._cache.open(job)
            if job.base is not None:
                job.num_done = min(len(job.base.tokens), len(job.tokens) - 1)
                for layer, kv in job.base.kv.items():
                    job.hold(layer, kv[0, :, : job.num_done], kv[1, :, : job.num_done], 0)
                job.base = None
            left = len(job.tokens) - job.num_done
            if self._deterministic and min(left, self.prefill_budget) > budget:
                break
            if self._joined is not None and chunks and left > budget:
                break
            num = min(left, budget) if self._joined is None else left
            chunks.append((job, job.num_done, job.num_done + num))
            budget -= num
            if budget <= 0:
                break
        return chunks

    def _forward(self, slabs: list[Slab], chunks: list[tuple[Prefix, int, int]]) -> Tensor:
        """Hidden states of the decoding rows, slab by slab; the chunks become part of their prefixes."""
        together = [(slab, 0, len(slab.sequences)) for slab in slabs]
        if self._joined is None and not self._deterministic:
            return self._forward_together(together, chunks)
        alone = [[(slab, row, 1)] for slab in slabs for row in range(len(slab.sequences))]
        hidden = [self._forward_together(rows, []) for rows in (alone if self._deterministic else [together])]
        for chunk in chunks:
            self._forward_together([], [chunk])
        return torch.cat(hidden) if hidden else self._no_rows

    def _forward_together(self, rows: list[tuple[Slab, int, int]], chunks: list[tuple[Prefix, int, int]]) -> Tensor:
        attention = StepAttention(rows, chunks, self._device)
        if not attention.token_ids:
            return self._no_rows
        ids = torch.tensor(attention.token_ids, device=self._device)
        positions = torch.tensor(attention.positions, device=self._device)
        hidden = self._body(ids, positions, attention, self._states(rows, chunks))
        row = num_decoding = sum(num for _, _, num in rows)
        for prefix, begin, end in chunks:
            row += end - begin
            prefix.num_done = end
            self.num_prefill_tokens += end - begin
            if end == len(prefix.tokens):
                prefix.last_hidden = hidden[row - 1].clone()
                self._room.confirm(sum(kv.nbytes for kv in prefix.kv.values()), len(prefix.tokens))
                self._jobs.remove(prefix)
                self._trim_prefixes()
                if prefix.waiting:  # the shared part of recomputed sequences has none
                    self._ready.append(prefix)
        return hidden[:num_decoding]

    def _states(self, rows: list[tuple[Slab, int, int]], chunks: list[tuple[Prefix, int, int]]) -> States | None:
        """Of the rows, or those that a whole prefix is to fill; None: layers carry none."""
        if self._joined is None:
            return None
        for prefix, _, _ in chunks:
            prefix.states = States()
            return prefix.states
        sequences = [sequence for slab, first, num in rows for sequence in slab.sequences[first : first + num]]
        return sequences[0].states if self._deterministic else self._joined.of(sequences)

    def _sample(self, decoding: list[Sequence], hidden: Tensor) -> list[tuple[int, Completion]]:
        """One token for every decoding sequence and for every sequence that starts from a complete prefix."""
        ready, self._ready = self._ready, deque()
        sequences = decoding + [s for p in ready for s in p.waiting]
        if not sequences:
            return []
        complete = [p.last_hidden for p in ready if p.last_hidden is not None]
        states = torch.cat([hidden, *(last[None] for last in complete)]) if ready else hidden
        source = list(range(len(decoding))) + [len(decoding) + i for i, p in enumerate(ready) for _ in p.waiting]
        if self._deterministic:
            logits = torch.cat([self._body.logits(state[None]) for state in states])
        else:
            logits = self._body.logits(states)
        if len(source) > len(states):
            logits = logits[torch.tensor(source, device=self._device)]
        samplings = [s.sampling for s in sequences]
        uniforms = [s.uniforms.next() if s.sampling.temperature > 0 else 0.0 for s in sequences]
        if self._deterministic:
            pairs = [sample(logits[i : i + 1], samplings[i : i + 1], uniforms[i : i + 1]) for i in range(len(logits))]
            tokens, logprobs = (torch.cat(x) for x in zip(*pairs, strict=True))
        else:
            tokens, logprobs = sample(logits, samplings, uniforms)
        self.num_generated_tokens += len(sequences)
        results = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ended = []
        for sequence in decoding:
            ended += self._append(sequence, *next(results))
        while ready:
            prefix = ready.popleft()  # its memory is free before the next one's rows are filled
            for sequence in prefix.waiting:
                ended += self._append(sequence, *next(results))
                if sequence.request_id in self._running:
                    self._cache.start(sequence, prefix)
            prefix.waiting = []
        return ended

    def _append(self, sequence: Sequence, token: int, logprob: float) -> list[tuple[int, Completion]]:
        """Its completion, if that was its last token."""
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sequence.versions.append(self.version)
        reason = self._reason(sequence)
        if not reason:
            return []
        self._cache.remove(sequence)
        del self._running[sequence.request_id]
        return [(sequence.request_id, _completion(sequence, reason))]

    def _reason(self, sequence: Sequence) -> str:
        sampling = sequence.sampling
        if sequence.tokens[-1] in sampling.stop_ids:
            return "stop"
        if sampling.stop and completes_stop(sequence.tokens[sequence.num_prompt :], sampling.stop, self._decode):
            return "stop"
        return "length" if len(sequence.logprobs) == sampling.max_tokens else ""


def _completion(sequence: Sequence, reason: str) -> Completion:
    return Completion(
        token_ids=np.array(sequence.tokens[sequence.num_prompt :], np.int32),
        logprobs=np.array(sequence.logprobs, np.float32),
        versions=np.array(sequence.versions, np.int32),
        finish_reason=reason,
    )
