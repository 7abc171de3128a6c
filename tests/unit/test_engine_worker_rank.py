"""What a rank that computes a part of an engine says of a swap."""

import msgspec
import pytest
import torch

from spmd_rl.packing.messages import WeightsLoaded
from spmd_rl.ranks import engine_worker_rank
from spmd_rl.weights.wire import Received


class Clocked:
    """An engine that takes two seconds to load, and weights that come after five."""

    def __init__(self) -> None:
        self.now, self.loaded = 0.0, -1

    def load_weights(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        self.now, self.loaded = self.now + 2.0, version

    def arrived(self) -> Received:
        self.now += 5.0
        return Received(version=3, tensors={}, checksums=[7], num_bytes=0, receive_s=1.0, received_bytes=0)


def test_a_member_stands_still_while_it_waits_for_the_weights_that_its_leader_has():
    engine = Clocked()
    message = engine_worker_rank.load_next(engine, 3, engine.arrived, clock=lambda: engine.now)
    assert engine.loaded == 3
    told = {"version": 3, "checksums": [7], "receive_s": 1.0, "pause_s": 7.0}
    assert type(message) is WeightsLoaded and msgspec.structs.asdict(message) == told


def test_weights_of_another_version_than_the_leaders_plan_says_are_refused():
    engine = Clocked()
    with pytest.raises(RuntimeError, match="the leader's plan says weights 4, 3 arrived"):
        engine_worker_rank.load_next(engine, 4, engine.arrived)
    assert engine.loaded == -1
