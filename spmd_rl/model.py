"""A `transformers` causal LM from a local folder, with our attention and log-probs that never hold [tokens, vocab].

Given a folder with a config.json (and safetensors), `build` returns the ordinary module of that architecture whose
attention layers call the `Attend` object that the caller passes along with the forward: `Segments` for packed
sequences here, the engine's paged cache elsewhere.  The object travels as a keyword argument through every layer, so
two models never share state and activation checkpointing finds it again in whatever thread runs the backward.
Promises: a packed forward equals the forwards of its sequences one by one.  Knows nothing of ranks or engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.logging import disable_progress_bar

ATTENTION = "spmd_varlen"


class Attend(Protocol):
    """Attention of one layer over one forward's tokens."""

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [1, H, T, D]
        k: Tensor,  # [1, H_kv, T, D]
        v: Tensor,  # [1, H_kv, T, D]
        *,
        scale: float,
        window: int | None,  # a token sees itself and the window - 1 tokens before it; None = all before it
        softcap: float | None,
    ) -> Tensor:  # [1, T, H, D]
        ...


class Span(NamedTuple):
    """Tokens start … end of a packed forward; they go on from tokens first … last (from nothing where first = last).

    Example: 5 tokens of a prompt and 2 and 3 of two replies to it are (0, 5, 0, 0), (5, 7, 0, 5) and (7, 10, 0, 5).
    """

    start: int
    end: int
    first: int
    last: int

    @property
    def position(self) -> int:
        """Of its first token in the sequence."""
        return self.last - self.first

    def keys(self, x: Tensor, end: int | None = None) -> Tensor:  # [1, H, T, D] to [1, H, K, D]
        """What its last token, or the one before `end`, sees of x."""
        own = x[:, :, self.start : self.end if end is None else end]
        return torch.cat([x[:, :, self.first : self.last], own], 2) if self.position else own


def spans(cu_seqlens: Sequence[int], parents: Sequence[int] = ()) -> list[Span]:
    """Of packed segments, of which segment j goes on from segment parents[j] (itself: from nothing; (): all do)."""
    bounds = list(pairwise(map(int, cu_seqlens)))
    packed = []
    for j, ((a, b), parent) in enumerate(zip(bounds, parents or range(len(bounds)), strict=True)):
        first, last = bounds[parent] if parent != j else (a, a)
        packed.append(Span(a, b, first, last))
    return [span for span in packed if span.end > span.start]


def positions(packed: Sequence[Span], device: torch.device) -> Tensor:  # [T] int64
    """Of each token in its sequence."""
    return torch.cat([torch.arange(s.position, s.position + s.end - s.start, device=device) for s in packed])


class Segments:
    """Causal attention within packed sequences, whose starts may be shared; on CPU a loop of SDPA calls."""

    def __init__(self, cu_seqlens: Sequence[int], parents: Sequence[int] = ()) -> None:
        self.spans = spans(cu_seqlens, parents)
        self._on_device: tuple[Tensor, ...] = ()

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and _has_flash_attn():
            return self._flash(q, k, v, scale, window, softcap)
        outs = [
            causal_attention(
                q[:, :, s.start : s.end], s.keys(k), s.keys(v), scale=scale, window=window, softcap=softcap
            ).transpose(1, 2)
            for s in self.spans
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _flash(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Keys of a shared start are repeated for each that goes on from it; queries are the last of their keys."""
        from flash_attn import flash_attn_varlen_func

        queries = [s.end - s.start for s in self.spans]
        keys = [n + s.position for n, s in zip(queries, self.spans, strict=True)]
        if not self._on_device:
            where = [torch.cat([torch.arange(s.first, s.last), torch.arange(s.start, s.end)]) for s in self.spans]
            sums = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (queries, keys)]
            self._on_device = tuple(x.to(q.device) for x in (torch.cat(where), *sums))
        where, cu_queries, cu_keys = self._on_device
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        if keys != queries:
            k, v = k.index_select(0, where), v.index_select(0, where)
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_queries,
            cu_keys,
            max(queries),
            max(keys),
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
        return out[None]


@cache
def _has_flash_attn() -> bool:
    return find_spec("flash_attn") is not None


def causal_attention(
    q: Tensor,  # [1, H, Q, D], the last Q of the K positions
    k: Tensor,  # [1, H_kv, K, D]
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # [1, H, Q, D]
    """Attention of the last Q positions of one sequence to itself and what came before."""
    num_q, num_k = q.shape[2], k.shape[2]
    banded = window is not None and num_k > window
    mask = None
    if banded or softcap is not None or 1 < num_q < num_k:
        row = torch.arange(num_k - num_q, num_k, device=q.device)[:, None]
        col = torch.arange(num_k, device=q.device)
        mask = col <= row
        if banded:
            mask &= col > row - window
    if softcap is None:
        causal = mask is None and num_q > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * scale
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v.repeat_interleave(groups, 1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attend: Attend | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; `attend` is the keyword that came with the forward."""
    name = type(module).__name__
    if attend is None:
        raise ValueError(f"{name}: forward without `attend=`: call model.hidden_states, not the model itself")
    if attention_mask is not None or dropout or others.get("s_aux") is not None:
        raise ValueError(f"{name}: masks, attention dropout and attention sinks are not supported by {ATTENTION}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(module.layer_idx, query, key, value, scale=scale, window=sliding_window, softcap=softcap), None


def _no_mask(*_: object, **__: object) -> None:
    return None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


def load_config(folder: str | Path) -> PretrainedConfig:
    """The architecture in a local folder; refuses by name what our head or attention would compute wrongly."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: no model folder: {str(error).splitlines()[0]}") from error
    text = config.get_text_config()
    refused = {
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None) is not None,
        "logits_scaling": getattr(text, "logits_scaling", 1.0) != 1.0,
        "logit_scale": getattr(text, "logit_scale", 1.0) != 1.0,
        "attention_dropout": bool(getattr(text, "attention_dropout", 0.0)),
        "use_bidirectional_attention": bool(getattr(text, "use_bidirectional_attention", False)),
        "quantization_config": getattr(text, "quantization_config", None) is not None,
        "is_encoder_decoder": bool(config.is_encoder_decoder),
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(f"{folder}: config.{name} = {getattr(text, name)!r} is not supported")
    return config


def hidden_size(folder: str | Path) -> int:
    """Width of the model in a folder."""
    return load_config(folder).get_text_config().hidden_size


def engine_dtype(name: str, device: torch.device) -> torch.dtype:
    """What engines compute in, and so what travels to them; "auto" is bfloat16 on GPUs and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def exact_dtype(folder: str | Path, dtype: torch.dtype) -> torch.dtype:
    """The least type that holds every weight in a folder and every value of `dtype`."""
    stored = load_config(folder).dtype
    return torch.promote_types(stored, dtype) if isinstance(stored, torch.dtype) else torch.float32


def build(folder: str | Path, *, device: torch.device | str, dtype: torch.dtype, weights: bool) -> nn.Module:
    """The model in a folder, in eval mode.  weights=False: parameters on the meta device, only their shapes."""
    config = load_config(folder)
    if weights:
        model = _load(folder, config, dtype).to(device)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        _fill_buffers(model, device)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"{folder}: a head with a bias is not supported")
    return model.eval()


def _load(folder: str | Path, config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """With its weights; ValueError where the folder has not all of them."""
    disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}: its weights cannot be read: {str(error).splitlines()[0]}") from error
    wrong = sorted(info["missing_keys"]) + sorted(str(key) for key, *_ in info["mismatched_keys"])
    if wrong:  # transformers would go on with random ones
        raise ValueError(f"{folder}: weights missing or of another shape than config.json says: {', '.join(wrong[:3])}")
    return model


def _fill_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Compute the buffers that no checkpoint holds (rope frequencies, embedding scale), leaving parameters on meta."""
    for module in model.modules():
        if module._buffers:
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
            model._init_weights(module)


def hidden_states(
    model: nn.Module,
    token_ids: Tensor,  # [T] ints
    cu_seqlens: Sequence[int],  # [n + 1] Python ints, from 0 to T
    parents: Sequence[int] = (),  # [n], see `spans`
) -> Tensor:  # [T, d], after the last norm
    """Body of the model over packed sequences; positions restart in each."""
    attend = Segments(cu_seqlens, parents)
    return run_body(model, token_ids, positions(attend.spans, token_ids.device), attend)


def run_body(
    model: nn.Module,
    token_ids: Tensor,  # [T]
    positions: Tensor,  # [T]
    attend: Attend,
) -> Tensor:  # [T, d]
    """Body of the model over T tokens whose attention is whatever `attend` does."""
    out = model.base_model(
        input_ids=token_ids.long()[None], position_ids=positions[None], use_cache=False, attend=attend
    )
    return out.last_hidden_state[0]


def head_weight(model: nn.Module) -> Tensor:  # [V, d]
    """The matrix that turns hidden states into logits (the embedding itself where they are tied)."""
    return model.get_output_embeddings().weight


def token_logprobs(
    hidden: Tensor,  # [N, d]
    weight: Tensor,  # [V, d]
    targets: Tensor,  # [N] ints
    temperature: float = 1.0,
    chunk: int = 256,
) -> tuple[Tensor, Tensor]:  # [N], [N] float32 (float64 for float64 inputs)
    """Log-prob of each target and entropy of each row's distribution, softmax(hidden @ weight.T / temperature).

    Beside the gradients it holds 2 · chunk · V + 5 N floats at most, forward and backward (full logits: 4 N · V).  Both
    outputs have exact gradients for hidden and weight.  A weight whose rows are split over the ranks of a group (a
    DTensor) is used where it lies.
    Example: logits [2, 1, 0, -1] have entropy 0.9475 at T = 1, 0.4554 at 0.5, 1.1526 at 1.5.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, is {temperature} (greedy samples are scored at 1)")
    group, first = None, 0
    if isinstance(weight, DTensor):
        group, num_rows = weight.device_mesh.get_group(), -(-weight.shape[0] // weight.device_mesh.size())
        weight, first = weight.to_local(), weight.device_mesh.get_local_rank() * num_rows
    return _TokenLogprobs.apply(hidden, weight, targets.long() - first, 1.0 / temperature, chunk, group)


class _TokenLogprobs(torch.autograd.Function):
    """With a group, w has this rank's rows of the whole weight and targets count from its first."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        h: Tensor,
        w: Tensor,
        t: Tensor,
        inv_temp: float,
        chunk: int,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        exact = _accumulate_dtype(h)
        logit, mean, lse = (torch.zeros(len(h), dtype=exact, device=h.device) for _ in range(3))
        here = (t >= 0) & (t < len(w))
        for rows, z, p in _blocks(h, w, inv_temp, chunk):
            top = z.amax(-1)
            torch.sub(z, top[:, None], out=p).exp_()
            total = p.sum(-1)
            lse[rows] = top + total.log()
            logit[rows] = z.gather(1, t[rows, None].clamp(0, len(w) - 1))[:, 0] * here[rows]
            mean[rows] = z.mul_(p).sum(-1) / total  # of the logits, under the policy
        if group is not None:
            parts = lse.new_empty(group.size(), len(lse))
            dist.all_gather(list(parts.unbind()), lse, group=group)
            mean *= (lse - parts.logsumexp(0)).exp()
            lse = parts.logsumexp(0)
            dist.all_reduce(logit, group=group)
            dist.all_reduce(mean, group=group)
        entropy = lse - mean
        ctx.save_for_backward(h, w, t, lse, entropy)
        ctx.inv_temp, ctx.chunk, ctx.group = inv_temp, chunk, group
        ctx.set_materialize_grads(False)
        return logit - lse, entropy

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, d_logprob: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        h, w, t, lse, entropy = ctx.saved_tensors
        exact = _accumulate_dtype(h)
        here = ((t >= 0) & (t < len(w))).to(exact)
        dh = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(w, dtype=exact) if ctx.needs_input_grad[1] else None
        for rows, z, p in _blocks(h, w, ctx.inv_temp, ctx.chunk):
            torch.exp(z.sub_(lse[rows, None]), out=p)
            slope = torch.zeros_like(lse[rows]) if d_logprob is None else d_logprob[rows]
            if d_entropy is None:  # d logprob_t / dz_j = [j = t] - p_j
                dz = p.mul_(-slope[:, None])
            else:  # d H / dz_j = -p_j (log p_j + H)
                dz = z.add_(entropy[rows, None]).mul_(-d_entropy[rows, None]).sub_(slope[:, None]).mul_(p)
            dz.scatter_add_(1, t[rows, None].clamp(0, len(w) - 1), (slope * here[rows])[:, None])
            dz = dz.to(h.dtype)
            if dh is not None:
                dh[rows] = (dz @ w).mul_(ctx.inv_temp)
            if dw is not None:
                if dw.dtype == dz.dtype:
                    dw.addmm_(dz.t(), h[rows], alpha=ctx.inv_temp)
                else:
                    dw.add_(dz.t() @ h[rows], alpha=ctx.inv_temp)
        if ctx.group is not None and dh is not None:
            dist.all_reduce(dh, group=ctx.group)
        return dh, None if dw is None else dw.to(w.dtype), None, None, None, None


def _blocks(h: Tensor, w: Tensor, inv_temp: float, chunk: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their logits [chunk, V], as much memory beside them), in the same two blocks of memory every time."""
    exact = _accumulate_dtype(h)
    memory = torch.empty(2, min(chunk, len(h)), len(w), dtype=exact, device=h.device)
    for a in range(0, len(h), chunk):
        rows = slice(a, min(a + chunk, len(h)))
        z, beside = memory[:, : rows.stop - a].unbind()
        if exact == h.dtype:
            torch.addmm(z, h[rows], w.t(), beta=0, alpha=inv_temp, out=z)  # with beta 0 what is in z does not matter
        else:
            z.copy_(h[rows] @ w.t()).mul_(inv_temp)
        yield rows, z, beside


def _accumulate_dtype(h: Tensor) -> torch.dtype:
    return torch.float64 if h.dtype == torch.float64 else torch.float32
