import pytest

from spmd_rl.commands import evaluate


class Held:
    """A loop that a reward holds, a second longer at each look."""

    def __init__(self):
        self.seconds = 0.0

    def look(self):
        self.seconds += 1.0
        return ("reward at mine.py:12, which holds the event loop", self.seconds) if self.seconds > 1 else None


def test_an_evaluation_ends_where_a_reward_holds_the_event_loop(monkeypatch, capsys):
    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(evaluate, "LOOK_S", 0.001)
    monkeypatch.setattr(evaluate.os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        evaluate._end_when_held(Held(), 5.0)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "evaluation failed: reward at mine.py:12, which holds the event loop for 6 s\n"
