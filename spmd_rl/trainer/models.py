"""The modules of a trainer rank: the policy, and where the settings ask for them a critic and a frozen reference.

Given whole models (on the CPU to be sharded over a mesh, else on the device), shards them and says how they are run,
saved and sent.  All methods are collectives of all trainer ranks.  Knows nothing of losses, batches or optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from spmd_rl.model.causal_lm import weight_dtypes
from spmd_rl.trainer.lora import add_lora, lora_layers
from spmd_rl.trainer.optimizer import local, whole
from spmd_rl.trainer.sharding import LogProbs, Values, compute_in, recompute_layers, reshard, shard, value_head
from spmd_rl.trainer.tensor_parallel import parallelize
from spmd_rl.weights.layout import chunk, weights_of
from spmd_rl.weights.low_rank import Lora, merged


class Models:
    """Owns the sharded modules."""

    def __init__(
        self,
        *,
        policy: PreTrainedModel,  # a causal LM of spmd_rl.model.causal_lm, as are the others
        reference: PreTrainedModel | None = None,
        critic: PreTrainedModel | None = None,  # a body of its own for the values
        shared_critic: bool = False,  # values from the policy's body
        lora: Lora | None = None,  # train additions to the policy, not the policy
        mesh: DeviceMesh | None,  # axes ("dp_replicate", "dp_shard"[, "tp"]); None: not sharded, one process
        context: ProcessGroup | None = None,  # ranks that share the tokens of their micro-batches
        device: torch.device,
        compute_dtype: torch.dtype | None = None,  # None: bfloat16 on CUDA, that of the policy elsewhere
        head_dtype: torch.dtype | None = None,  # of logits and the products that they are made of; None: the same
        reshard_after_forward: bool | None = None,  # None: on CUDA only; False keeps gradients whole until the last
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
    ) -> None:
        cuda = device.type == "cuda"
        self.device, self.sharded = device, mesh is not None
        tp = mesh["tp"] if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else None
        self.num_averaged = 1 if mesh is None else mesh.size() // (1 if tp is None else tp.size())
        # False: another rank holds the same rollouts and speaks for them
        self.counts = (tp is None or tp.get_local_rank() == 0) and (context is None or dist.get_rank(context) == 0)
        self.sync_once = not (cuda if reshard_after_forward is None else reshard_after_forward)
        self.lora = lora
        if tp is not None:
            for model in filter(None, (policy, critic, reference)):
                parallelize(model, tp)
        if lora is not None:
            add_lora(policy, lora)
        master = next(policy.parameters()).dtype
        self.compute_dtype = compute_dtype or (torch.bfloat16 if cuda else master)
        casts = mesh is None and self.compute_dtype != master
        if activation_checkpointing and not casts:
            for model in filter(None, (policy, critic)):
                recompute_layers(model)
        self.policy = LogProbs(policy, value_head(policy) if shared_critic else None, context, head_dtype)
        self.critic = None if critic is None else Values(critic, value_head(critic), context)
        self.reference = (
            None if reference is None else LogProbs(reference, None, context, head_dtype).requires_grad_(False)
        )
        if mesh is not None:
            for root in self._roots:
                shard(
                    root,
                    mesh,
                    compute_dtype=self.compute_dtype,
                    reshard_after_forward=not self.sync_once,
                    cpu_offload=cpu_offload,
                )
        for root in self._roots if casts else ():
            compute_in(root, self.compute_dtype)
        self._rows: dict[str, DTensor] = {} if mesh is None or tp is None else self._make_rows(mesh["dp_shard"])
        self._layers = lora_layers(policy)
        frozen = self.frozen()
        self._merged = {name: torch.empty_like(frozen[name]) for name in map("{}.weight".format, self._layers)}
        self._frozen_square = self._square_of_frozen()
        self._rows_are_new = True
        self._dtypes: dict[torch.dtype, dict[str, torch.dtype]] = {}

    @property
    def model(self) -> PreTrainedModel:
        """The policy's language model."""
        return self.policy.model

    @property
    def _roots(self) -> list[LogProbs | Values]:
        return [root for root in (self.policy, self.critic, self.reference) if root is not None]

    @property
    def trained(self) -> nn.Module:
        """Everything with trained parameters, as one module."""
        return self.policy if self.critic is None else nn.ModuleDict({"policy": self.policy, "critic": self.critic})

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All trained parameters, tied ones once, by names that are the same on any mesh."""
        for root, module in (("policy", self.policy), ("critic", self.critic)):
            for name, parameter in module.named_parameters() if module is not None else ():
                if parameter.requires_grad:
                    yield f"{root}.{name}", parameter

    @property
    def critic_parameters(self) -> list[nn.Parameter]:
        modules = (self.policy.value_head, self.critic)
        return [p for module in modules if module is not None for p in module.parameters()]

    def gradients(self) -> list[list[Tensor]]:
        """Of the trained parameters that have one: the policy's, and those of a critic with a body of its own."""
        modules = filter(None, (self.policy, self.critic))
        return [[p.grad for p in module.parameters() if p.grad is not None] for module in modules]

    def last_backward(self, last: bool) -> None:
        """Before each backward of an optimizer step: gradients are reduced and shards dropped after the last."""
        if self.sharded and self.sync_once:
            for root in filter(None, (self.policy, self.critic)):
                assert isinstance(root, FSDPModule)
                root.set_requires_gradient_sync(last)
                root.set_reshard_after_backward(last)

    @torch.no_grad()
    def score(self, token_ids: Tensor, temperature: float) -> Tensor:  # [T] to [T - 1] float32
        """Log-prob of each token but the first given those before it."""
        rows = torch.arange(len(token_ids) - 1, device=self.device)
        logprobs: Tensor
        logprobs, _, _ = self.policy(token_ids[:-1], [0, len(rows)], rows, token_ids[1:], temperature)
        self.drop(self.policy)
        return logprobs.float()

    def drop(self, root: nn.Module | None) -> None:
        """Gathered parameters, after forwards without a backward."""
        if root is not None:
            reshard(root)

    def named_parameters(self) -> dict[str, Tensor]:
        """The language model's weights, see `weights_of`: DTensors where sharded.  Their memory stays where it is.

        What is trained in another form (with LoRA, or split over "tp") is as of the last `refresh`.
        """
        return self.frozen() | self._merged

    def frozen(self) -> dict[str, Tensor]:
        """The same without what LoRA adds."""
        return {name: p for name, p in self._whole_rows() if ".lora_" not in name}

    def additions(self) -> dict[str, Tensor]:
        """What LoRA adds, by layer name + ".lora_a" and ".lora_b"."""
        return {name: p for name, p in self._whole_rows() if ".lora_" in name}

    def _whole_rows(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._rows.get(name, p.detach())) for name, p in weights_of(self.model).items())

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring what `named_parameters` gives up to date: to be called after a step, by all ranks."""
        for name, parameter in self.model.named_parameters():
            if name in self._rows and (parameter.requires_grad or self._rows_are_new):
                local(self._rows[name]).copy_(_rows_of(whole(parameter), self._rows[name]))
        self._rows_are_new = False
        frozen, additions = self.frozen(), self.additions()
        for name, layer in self._layers.items():
            weight, a, b = frozen[f"{name}.weight"], additions[f"{name}.lora_a"], additions[f"{name}.lora_b"]
            local(self._merged[f"{name}.weight"]).copy_(merged(local(weight), whole(a), local(b), layer.scale))

    def dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Of what `named_parameters` gives, in engines and folders of `dtype`."""
        if dtype not in self._dtypes:
            self._dtypes[dtype] = weight_dtypes(self.model, dtype)
        return self._dtypes[dtype]

    def _make_rows(self, shards: DeviceMesh) -> dict[str, DTensor]:
        """Memory for rows of the parameters that are split over "tp", as FSDP alone would cut them."""
        made = {}
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
                _, num = chunk(parameter.shape[0], index=shards.get_local_rank(), count=shards.size())
                mine = torch.empty(num, *parameter.shape[1:], dtype=parameter.dtype, device=self.device)
                made[name] = DTensor.from_local(
                    mine, shards, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
                )
        return made

    def state_dict(self) -> dict[str, Any]:
        """`model` by the names of the language model; `critic` beside it where there is one.

        With LoRA only what it adds, and `frozen`, by which the frozen model is known again.
        """
        states: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if self.lora is not None:
            states["model"] = {name: tensor for name, tensor in states["model"].items() if ".lora_" in name}
            states["frozen"] = self._frozen_square.clone()
        for name, module in self._beside():
            states[name] = get_model_state_dict(module)
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """ValueError where LoRA's additions are of another model than the one that they would be put beside."""
        if self.lora is not None and not torch.allclose(states["frozen"], self._frozen_square, rtol=1e-9):
            here, there = float(self._frozen_square) ** 0.5, float(states["frozen"]) ** 0.5
            raise ValueError(f"LoRA was trained beside a model of norm {there:.9g}, model.path is one of {here:.9g}")
        strict = StateDictOptions(strict=self.lora is None)
        set_model_state_dict(self.model, states["model"], options=strict)
        for name, module in self._beside():
            set_model_state_dict(module, states[name])

    @torch.no_grad()
    def _square_of_frozen(self) -> Tensor:
        """[] float64 on the CPU: the squared norm of what is not trained."""
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        squares = [whole(p.square().sum(dtype=torch.float64)).cpu() for p in frozen]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def _beside(self) -> Sequence[tuple[str, nn.Module]]:
        modules = {"value_head": self.policy.value_head, "critic": self.critic}
        return [(name, module) for name, module in modules.items() if module is not None]


def _rows_of(tensor: Tensor, like: DTensor) -> Tensor:
    """The rows of a whole tensor that the shard `like` has."""
    mesh = like.device_mesh
    first, num = chunk(tensor.shape[0], index=mesh.get_local_rank(), count=mesh.size())
    return tensor[first : first + num]
