"""What a user's code raises or gives back: named by kind, place and frames, and never a number that nobody measured."""

import asyncio
import importlib
import json
from decimal import Decimal

import numpy as np
import pytest
import torch

from spmd_rl.diagnostics.user_code import printable, tell
from spmd_rl.envs.environment import judged
from spmd_rl.orchestrator.failure_log import MOST, FailureLog
from spmd_rl.types import FailedAttempt, Rollout
from tests.unit.test_episodes import play

SOURCE = """
import asyncio, json
from spmd_rl.envs.environment import judged, take_turn
from spmd_rl.types import Rollout

class Raises:
    def __init__(self, how, reward=None):
        self.how, self.reward = how, reward

    async def rollout(self, task, generate):
        rollout = Rollout(env="", task_id="")
        rollout.append([1])
        await take_turn(rollout, generate)
        return await getattr(self, self.how)(rollout)

    async def key(self, rollout):
        return {"a": 1}["answer"]  # key

    async def library(self, rollout):
        return json.loads("{")  # library

    async def exits(self, rollout):
        raise SystemExit(3)  # exits

    async def interrupt(self, rollout):
        raise KeyboardInterrupt  # interrupt

    async def base(self, rollout):
        raise BaseException("odd")  # base

    async def several(self, rollout):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.key(rollout))

    async def stops(self, rollout):
        raise StopIteration  # stops

    async def deep(self, rollout):
        def again(): return again()  # deep
        again()

    async def no_text(self, rollout):
        class Silent(Exception):
            def __str__(self): raise ValueError
        raise Silent  # no_text

    async def huge(self, rollout):
        raise ValueError("x" * 10_000_000)  # huge

    async def terminal(self, rollout):
        raise ValueError("\\x1b[2J\\nred")  # terminal

    async def threads(self, rollout):
        def fails(): raise OSError("in a thread")  # threads
        await asyncio.to_thread(fails)

    async def nothing(self, rollout):
        return None

    async def other(self, rollout):
        return {"reward": 1.0}

    async def empty(self, rollout):
        return judged(Rollout(env="", task_id=""), 1.0)

    async def twice(self, rollout):
        rollout.append(rollout.token_ids[1:], [0.0] * 3, [4] * 3)
        return judged(rollout, 1.0)

    async def outside(self, rollout):
        rollout.append([5000])
        return judged(rollout, 1.0)

    async def rewards(self, rollout):
        return judged(rollout, self.reward)  # rewards

    async def sets(self, rollout):
        rollout.reward = self.reward
        return rollout

class Plain(Raises):
    def rollout(self, task, generate):
        return Rollout(env="", task_id="")
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "user_env.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("user_env")


def line_of(mine, mark: str) -> str:
    lines = SOURCE.splitlines()
    return f"{mine.__file__}:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


@pytest.mark.parametrize(
    ("how", "mark", "kind", "text"),
    [
        ("key", "key", "KeyError", "'answer'"),
        ("library", "library", "JSONDecodeError", "Expecting property name"),
        ("exits", "exits", "SystemExit", "3"),
        ("interrupt", "interrupt", "KeyboardInterrupt", ""),
        ("base", "base", "BaseException", "odd"),
        ("several", "key", "KeyError", "'answer'"),
        ("stops", "stops", "RuntimeError", "StopIteration"),
        ("deep", "deep", "RecursionError", "maximum recursion depth"),
        ("no_text", "no_text", "Silent", "<its str() raised ValueError>"),
        ("huge", "huge", "ValueError", "(10000000 characters)"),
        ("terminal", "terminal", "ValueError", "\\x1b[2J red"),
        ("threads", "threads", "OSError", "in a thread"),
    ],
)
def test_each_attempt_is_told_with_the_line_in_the_users_file_and_the_reply(mine, how, mark, kind, text):
    told: list[FailedAttempt] = []
    rollouts = play(mine.Raises(how), failed=told.append, decode=lambda ids: f"text of {len(ids)}")
    assert [(t.ticket, t.attempt) for t in sorted(told, key=lambda t: (t.ticket, t.attempt))] == [
        (12, 0), (12, 1), (13, 0), (13, 1),
    ]  # fmt: skip
    for one in told:
        assert (one.kind, one.place, one.reply) == (kind, line_of(mine, mark), ["text of 3"])
        assert text in one.error and len(one.error) < 600 and one.error.isprintable()
        assert one.traceback[-1].startswith(one.place) and all(mine.__file__ in frame for frame in one.traceback)
        assert len(json.dumps(one.traceback)) < 10_000
    assert all(r.failed and r.error.startswith(kind) and r.error.endswith(f"({one.place})") for r in rollouts)


BAD_REWARDS = [
    "1.0", None, b"1", [1.0], (1.0,), 1j, Decimal("1"), torch.tensor(1.0), torch.ones(2), np.array(1.0), np.ones(1),
    float("nan"), float("inf"), -np.inf, np.float32("nan"), 10**400, {}, {"a": None}, {"a": {"b": 1.0}}, {"a": "1"},
    {1: 1.0}, {"a": float("nan")}, object(), np.str_("1"), {"a": 1e308, "b": 1e308},
]  # fmt: skip


@pytest.mark.parametrize("how", ["rewards", "sets"])
@pytest.mark.parametrize("reward", BAD_REWARDS, ids=lambda reward: repr(reward)[:20])
def test_what_is_no_reward_fails_its_sample_with_the_place(mine, reward, how):
    rollouts = play(mine.Raises(how, reward), max_retries=0)
    place = line_of(mine, "rewards") if how == "rewards" else mine.__file__
    assert all(r.failed and r.error.startswith("BadReturn: ") and place in r.error for r in rollouts)


@pytest.mark.parametrize(
    ("reward", "value"),
    [(1, 1.0), (True, 1.0), (False, 0.0), (0.5, 0.5), (np.float32(0.5), 0.5), (np.float16(2), 2.0), (np.int64(3), 3.0),
     (np.bool_(True), 1.0), ({"a": np.float32(0.5), "b": True, "c": None}, 1.5)],
)  # fmt: skip
def test_numbers_of_python_and_numpy_are_rewards(mine, reward, value):
    for rollout in play(mine.Raises("rewards", reward)):
        assert (rollout.failed, rollout.reward, type(rollout.reward)) == (False, value, float)
        json.dumps(rollout.reward_parts)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nothing", "an episode gave back None (NoneType), not a Rollout"),
        ("other", "(dict), not a Rollout"),
        ("empty", "none of the 3 tokens that were sampled is in the rollout"),
        ("twice", "6 tokens of the rollout have versions, 3 were sampled"),
        ("outside", "has the id 5000, the model knows 0 to 99"),
    ],
)
def test_a_rollout_that_cannot_be_trained_fails_its_sample_by_name(mine, how, message):
    for rollout in play(mine.Raises(how), vocab_size=100):
        assert message in rollout.error and rollout.error.startswith("BadReturn") and mine.__file__ in rollout.error


def test_an_episode_that_is_no_coroutine_is_said(mine):
    for rollout in play(mine.Plain("key")):
        assert "`rollout` is to be an `async def`" in rollout.error and mine.__file__ in rollout.error


def test_a_context_that_no_engine_could_take_fails_its_sample(mine):
    class Asks:
        def __init__(self, context):
            self.context = context

        async def rollout(self, task, generate):
            await generate(self.context)

    for context in ([], [[1]], [1.5], [float("nan")], ["a"], [-1], [100]):
        rollouts, asked = play(Asks(context), vocab_size=100, asked=True)
        assert all(r.failed and __file__ in r.error for r in rollouts) and not asked


def test_an_environment_that_goes_on_after_its_cancellation_gets_no_more_tokens():
    class GoesOn:
        caught = 0

        async def rollout(self, task, generate):
            while True:
                try:
                    await generate([1])
                except asyncio.CancelledError:
                    self.caught += 1
                    if self.caught > 9:
                        raise

    rollouts, asked = play(GoesOn(), cancel=True, asked=True)
    assert {r.finish_reason for r in rollouts} == {"cancelled"} and len(asked) <= 2


def test_a_prompt_that_is_too_long_is_skipped_whatever_the_environment_makes_of_it():
    class Wraps:
        async def rollout(self, task, generate):
            try:
                await generate(range(200))
            except Exception as error:
                raise RuntimeError("mine") from error

    told = []
    rollouts = play(Wraps(), failed=told.append)
    assert all(r.skipped and r.error.startswith("PromptTooLong: 200 tokens") for r in rollouts) and not told


def test_a_reward_functions_own_place_is_told(mine):
    def gives_text(data, reply):
        return "1.0"

    with pytest.raises(ValueError, match="reward = '1") as raised:
        judged(Rollout(env="", task_id=""), gives_text({}, ""), function=gives_text)
    assert tell(raised.value).place == f"{__file__}:{gives_text.__code__.co_firstlineno}"


def test_the_file_of_failures_has_the_first_of_each_kind_and_says_where_it_ends(tmp_path):
    log = FailureLog(tmp_path / "failures.jsonl")
    names = dict.fromkeys(("env", "task_id", "purpose", "error", "place"), "\x1b\ud800")
    numbers = dict.fromkeys(("version", "group_id", "sample", "ticket", "attempt"), 1)
    for _ in range(2 * MOST):
        log.add(FailedAttempt(time=1.0, kind="KeyError", traceback=[], reply=["a"], **names, **numbers))
    log.add(FailedAttempt(time=1.0, kind="OSError", traceback=[], reply=["a"], **names, **numbers))
    lines = (tmp_path / "failures.jsonl").read_text().splitlines()
    entries = list(map(json.loads, lines))
    assert [e["kind"] for e in entries] == ["KeyError"] * (MOST + 1) + ["OSError"]
    assert "failures/KeyError" in entries[MOST]["more"] and "\x1b" not in "".join(lines)


def test_text_for_a_terminal_has_nothing_that_it_would_obey():
    assert printable("a\x1b[31m\nb\u202ec\ud800é") == "a\\x1b[31m b\\u202ec\\ud800é"
