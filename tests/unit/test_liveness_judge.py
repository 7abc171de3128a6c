"""Who is judged gone or stuck; time is given."""

from spmd_rl.distributed.liveness import Judge, Mark

ROLES = ("inference", "trainer", "trainer")


def make_judge() -> Judge:
    return Judge(roles=ROLES, heartbeat_timeout_s=10.0, stall_timeout_s=60.0, now=0.0)


def mark(beat: int, doing: str = "stepping", since_s: float = 1.0, *, left: bool = False) -> Mark:
    return Mark(beat=beat, doing={"main": (doing, since_s)}, left=left)


def test_all_well_while_everybody_beats():
    judge = make_judge()
    for beat in range(100):
        assert judge.verdict({rank: mark(beat) for rank in range(3)}, now=beat * 5.0) is None


def test_a_silent_rank_is_named_with_what_everybody_did():
    judge = make_judge()
    assert judge.verdict({0: mark(1), 1: mark(1), 2: mark(1, "packing")}, now=1.0) is None
    marks = {0: mark(9), 1: mark(9, "waiting for a batch", 8.0), 2: mark(1, "packing")}
    assert judge.verdict(marks, now=11.0) is None
    rank, text = judge.verdict({**marks, 0: mark(10), 1: mark(10, "waiting for a batch", 8.5)}, now=11.5)
    assert rank == 2
    assert text == (
        "no sign of life for 10.5 s; rank 0 (inference): stepping for 1.0 s; "
        "rank 1 (trainer): waiting for a batch for 8.5 s; rank 2 (trainer): packing for 1.0 s"
    )


def test_a_rank_that_never_came_is_named():
    judge = make_judge()
    assert judge.verdict({0: mark(1), 1: mark(1)}, now=9.0) is None
    rank, text = judge.verdict({0: mark(2), 1: mark(2)}, now=10.5)
    assert rank == 2 and "rank 2 (trainer): never heard of" in text


def test_a_rank_that_works_at_one_thing_for_too_long_is_stuck():
    marks = {0: mark(1), 1: mark(1, "waiting for a batch", 61.0), 2: mark(1, "optimizer step", 61.0)}
    rank, text = make_judge().verdict(marks, now=1.0)
    assert rank == 2 and text.startswith("stuck at 'optimizer step' for 61 s; rank 0")


def test_one_may_wait_as_long_as_another_works():
    marks = {0: mark(1), 1: mark(1, "waiting for a batch", 1e6), 2: mark(1, "waiting for a batch", 1e6)}
    assert make_judge().verdict(marks, now=1.0) is None


def test_everybody_waiting_is_a_deadlock():
    marks = {rank: mark(1, f"waiting for thing {rank}", 60.0 + rank) for rank in range(3)}
    assert make_judge().verdict(marks, now=1.0) is None  # rank 0 has waited just 60 s
    rank, text = make_judge().verdict({**marks, 0: mark(2, "waiting for thing 0", 60.5)}, now=1.0)
    assert rank == 2 and text.startswith("everybody waits; rank 0 (inference): waiting for thing 0 for 60.5 s")


def test_each_thread_of_a_rank_counts():
    both = Mark(beat=1, doing={"main": ("waiting for work", 100.0), "engine": ("decoding", 0.1)})
    others = {1: mark(1, "waiting for a batch", 100.0), 2: mark(1, "waiting for a batch", 100.0)}
    assert make_judge().verdict({0: both, **others}, now=1.0) is None
    stuck = Mark(beat=2, doing={"main": ("waiting for work", 100.0), "engine": ("decoding", 61.0)})
    rank, text = make_judge().verdict({0: stuck, **others}, now=1.0)
    assert rank == 0
    assert text.startswith(
        "stuck at 'decoding' for 61 s; rank 0 (inference): waiting for work for 100.0 s, engine decoding for 61.0 s;"
    )


def test_who_left_in_good_order_is_not_missed():
    judge = make_judge()
    assert judge.verdict({0: mark(1), 1: mark(1), 2: mark(1, left=True)}, now=1.0) is None
    assert judge.verdict({0: mark(2), 1: mark(2), 2: mark(1, left=True)}, now=1000.0) is None
    assert judge.verdict({rank: mark(3, left=True) for rank in range(3)}, now=2000.0) is None


def test_a_judge_that_stood_still_itself_blames_nobody_who_has_moved():
    judge = make_judge()
    judge.verdict({rank: mark(1) for rank in range(3)}, now=1.0)
    assert judge.verdict({rank: mark(2) for rank in range(3)}, now=500.0) is None
