"""What jobs share."""

import fcntl

import pytest

from spmd_rl.demo import tiny_model
from tests.end_to_end.jobs import MODELS


@pytest.fixture(scope="session", autouse=True)
def _the_tiny_model_is_made_once() -> None:
    """Jobs beside each other would both make it, and the second find it there."""
    MODELS.mkdir(exist_ok=True)
    with (MODELS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (MODELS / "tiny").exists():
            tiny_model.make(MODELS / "tiny")
