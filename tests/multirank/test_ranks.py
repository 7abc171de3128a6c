"""The helper that runs tests on several ranks."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, run_processes, run_ranks


def sum_of_ranks(rank: int, more: int) -> int:
    value = torch.tensor([rank + more])
    dist.all_reduce(value)
    return int(value)


def fails_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("a bad thing")
    dist.recv(torch.zeros(1), src=1)


def dies(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    dist.recv(torch.zeros(1), src=0)


def waits_for_ever(rank: int) -> None:
    dist.recv(torch.zeros(1), src=1 - rank)


def reads_its_rank() -> tuple[str, bool]:
    return os.environ["RANK"], dist.is_initialized()


def test_every_rank_answers():
    assert run_ranks(sum_of_ranks, 3, 10) == [33, 33, 33]


def test_the_traceback_of_the_failing_rank_surfaces():
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed.*fails_on_rank_1.*ValueError: a bad thing"):
        run_ranks(fails_on_rank_1, 2)


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankFailed, match="rank 0 died with exit code 3"):
        run_ranks(dies, 2)


def test_a_rank_that_hangs_shows_where():
    with pytest.raises(RankFailed, match=r"(?s)is still at work after.*waits_for_ever"):
        run_ranks(waits_for_ever, 2, timeout_s=2.0)


def test_processes_have_the_variables_of_torchrun_and_no_group():
    assert run_processes(reads_its_rank, 2) == [("0", False), ("1", False)]
