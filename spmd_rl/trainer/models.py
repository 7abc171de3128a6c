"""The modules of a trainer rank: the policy, and where the settings ask for them a critic and a frozen reference.

Given whole models on the device, shards them and says how they are run, saved and sent.  All methods are collectives
of all trainer ranks.  Knows nothing of losses, batches or optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from spmd_rl.trainer.lora import Lora, add_lora, lora_layers, merged
from spmd_rl.trainer.optimizer import local, whole
from spmd_rl.trainer.sharding import LogProbs, Values, recompute_layers, reshard, shard, value_head
from spmd_rl.trainer.tensor_parallel import parallelize


class Models:
    """Owns the sharded modules."""

    def __init__(
        self,
        *,
        policy: nn.Module,  # a causal LM of spmd_rl.model, as are the others
        reference: nn.Module | None = None,
        critic: nn.Module | None = None,  # a body of its own for the values
        shared_critic: bool = False,  # values from the policy's body
        lora: Lora | None = None,  # train additions to the policy, not the policy
        mesh: DeviceMesh | None,  # axes ("dp_replicate", "dp_shard"[, "tp"]); None: not sharded, one process
        context: ProcessGroup | None = None,  # ranks that share the tokens of their micro-batches
        device: torch.device,
        compute_dtype: torch.dtype | None = None,  # None: bfloat16 on CUDA, float32 elsewhere
        reshard_after_forward: bool | None = None,  # None: on CUDA only; False keeps gradients whole until the last
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
    ) -> None:
        cuda = device.type == "cuda"
        self.device, self.sharded = device, mesh is not None
        tp = mesh["tp"] if mesh is not None and "tp" in mesh.mesh_dim_names else None
        self.num_averaged = 1 if mesh is None else mesh.size() // (1 if tp is None else tp.size())
        # False: another rank holds the same rollouts and speaks for them
        self.counts = (tp is None or tp.get_local_rank() == 0) and (context is None or dist.get_rank(context) == 0)
        self.sync_once = not (cuda if reshard_after_forward is None else reshard_after_forward)
        self.lora = lora
        if lora is not None:
            add_lora(policy, lora)
        if tp is not None:
            for model in filter(None, (policy, critic, reference)):
                parallelize(model, tp)
        if activation_checkpointing:
            for model in filter(None, (policy, critic)):
                recompute_layers(model)
        self.policy = LogProbs(policy, value_head(policy) if shared_critic else None, context)
        self.critic = None if critic is None else Values(critic, value_head(critic), context)
        self.reference = None if reference is None else LogProbs(reference, None, context).requires_grad_(False)
        if mesh is not None:
            dtype = compute_dtype or (torch.bfloat16 if cuda else torch.float32)
            for root in self._roots:
                shard(
                    root,
                    mesh,
                    compute_dtype=dtype,
                    reshard_after_forward=not self.sync_once,
                    cpu_offload=cpu_offload,
                )
        self._layers = lora_layers(policy)
        self._sent = self._make_sent(mesh)

    @property
    def model(self) -> nn.Module:
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

    def gradients(self) -> list[Tensor]:
        """Of all trained parameters that have one."""
        return [p.grad for p in self.trained.parameters() if p.grad is not None]

    def last_backward(self, last: bool) -> None:
        """Before each backward of an optimizer step: gradients are reduced and shards dropped after the last."""
        if self.sharded and self.sync_once:
            for root in filter(None, (self.policy, self.critic)):
                root.set_requires_gradient_sync(last)
                root.set_reshard_after_backward(last)

    @torch.no_grad()
    def score(self, token_ids: Tensor) -> Tensor:  # [T] to [T - 1] float32
        """Log-prob of each token but the first given those before it, at temperature 1."""
        rows = torch.arange(len(token_ids) - 1, device=self.device)
        logprobs, _, _ = self.policy(token_ids[:-1], [0, len(rows)], rows, token_ids[1:], 1.0)
        self.drop(self.policy)
        return logprobs.float()

    def drop(self, root: nn.Module | None) -> None:
        """Gathered parameters, after forwards without a backward."""
        if root is not None:
            reshard(root)

    def named_parameters(self) -> dict[str, Tensor]:
        """The language model's, by name, tied ones once: DTensors where sharded.  Their memory stays where it is.

        What is trained in another form (with LoRA, or split over "tp") is as of the last `refresh`.
        """
        return {
            name: self._sent.get(name, parameter.detach())
            for name, parameter in self.model.named_parameters()
            if ".lora_" not in name
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring what `named_parameters` gives up to date: to be called after a step, by all ranks."""
        for name, sent in self._sent.items():
            if name in self._split:
                rows = _rows_of(self._split[name].full_tensor(), sent)
            else:
                layer = self._layers[name.removesuffix(".weight")]
                rows = merged(layer, local(layer.weight), whole(layer.lora_a), local(layer.lora_b))
            local(sent).copy_(rows)

    def _make_sent(self, mesh: DeviceMesh | None) -> dict[str, Tensor]:
        """Memory for the parameters that are not sent as they are trained."""
        named = dict(self.model.named_parameters())
        self._split = {
            n: p for n, p in named.items() if isinstance(p, DTensor) and "tp" in p.device_mesh.mesh_dim_names
        }
        sent = {f"{name}.weight": torch.empty_like(layer.weight.detach()) for name, layer in self._layers.items()}
        for name, parameter in self._split.items():
            shards = mesh["dp_shard"]
            num = -(-parameter.shape[0] // shards.size())
            first = min(shards.get_local_rank() * num, parameter.shape[0])
            rows = min(num, parameter.shape[0] - first)
            mine = torch.empty(rows, *parameter.shape[1:], dtype=parameter.dtype, device=self.device)
            sent[name] = DTensor.from_local(
                mine, shards, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        return {name: sent[name] for name in named if name in sent}

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's shard), in the order of `named_parameters`."""
        for name, parameter in self.named_parameters().items():
            yield name, local(parameter)

    def state_dict(self) -> dict[str, object]:
        """`model` by the names of the language model; `critic` beside it where there is one."""
        states: dict[str, object] = {"model": get_model_state_dict(self.model)}
        for name, module in self._beside():
            states[name] = get_model_state_dict(module)
        return states

    def load_state_dict(self, states: dict[str, object]) -> None:
        for name, module in (("model", self.model), *self._beside()):
            set_model_state_dict(module, states[name])

    def _beside(self) -> Sequence[tuple[str, nn.Module]]:
        modules = {"value_head": self.policy.value_head, "critic": self.critic}
        return [(name, module) for name, module in modules.items() if module is not None]


def _rows_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The rows of a whole tensor that the shard `like` has."""
    num = -(-tensor.shape[0] // like.device_mesh.size())
    first = min(like.device_mesh.get_local_rank() * num, tensor.shape[0])
    return tensor[first : first + len(local(like))]


def _axes(tensor: Tensor) -> Sequence[str]:
    return tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()
