"""The modules of a trainer rank: the policy, and where the settings ask for them a critic and a frozen reference.

Given whole models on the device, shards them and says how they are run, saved and sent.  All methods are collectives
of all trainer ranks.  Knows nothing of losses, batches or optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.trainer.sharding import LogProbs, Values, recompute_layers, reshard, shard, value_head


class Models:
    """Owns the sharded modules."""

    def __init__(
        self,
        *,
        policy: nn.Module,  # a causal LM of spmd_rl.model, as are the others
        reference: nn.Module | None = None,
        critic: nn.Module | None = None,  # a body of its own for the values
        shared_critic: bool = False,  # values from the policy's body
        mesh: DeviceMesh | None,  # axes ("dp_replicate", "dp_shard"); None: not sharded, one process
        device: torch.device,
        compute_dtype: torch.dtype | None = None,  # None: bfloat16 on CUDA, float32 elsewhere
        reshard_after_forward: bool | None = None,  # None: on CUDA only; False keeps gradients whole until the last
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
    ) -> None:
        cuda = device.type == "cuda"
        self.device, self.sharded = device, mesh is not None
        self.sync_once = not (cuda if reshard_after_forward is None else reshard_after_forward)
        if activation_checkpointing:
            for model in filter(None, (policy, critic)):
                recompute_layers(model)
        self.policy = LogProbs(policy, value_head(policy) if shared_critic else None)
        self.critic = None if critic is None else Values(critic, value_head(critic))
        self.reference = None if reference is None else LogProbs(reference).requires_grad_(False)
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
        """The language model's, by name, tied ones once: DTensors where sharded.  Their memory stays where it is."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's shard), in the order of `named_parameters`."""
        for name, parameter in self.named_parameters().items():
            yield name, parameter.to_local() if hasattr(parameter, "to_local") else parameter

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
