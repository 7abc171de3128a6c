import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spmd_rl.processes.sandbox import Sandbox
from spmd_rl.processes.workers import Workers
from spmd_rl.rewards.llm_judge import Judge, JudgeFailed
from spmd_rl.rewards.math_expression import math_equals
from spmd_rl.rewards.program_tests import code_of, outputs_equal, statements_passed

PROMPT = "{question} {reply}"


class Server:
    """A chat completions server that gives the answers it was told, a status or a text each, and counts requests."""

    def __init__(self, *answers: int | str, hold: threading.Barrier | None = None) -> None:
        self.answers, self.asked, self.at_once, self.most, self.lock = list(answers), [], 0, 0, threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with outer.lock:
                    outer.at_once += 1
                    outer.most = max(outer.most, outer.at_once)
                    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    outer.asked.append((self.path, self.headers.get("Authorization"), body))
                    answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                if hold is not None:
                    hold.wait(10.0)
                with outer.lock:
                    outer.at_once -= 1
                if isinstance(answer, int):
                    self.send_error(answer)
                    return
                content = json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def ask(server, num=1, **settings):
    judge = Judge(url=server.url, model="m", prompt=PROMPT, pause_s=0.0, **settings)

    async def main():
        return await asyncio.gather(*(judge(f"reply {i}", question="q") for i in range(num)))

    try:
        return asyncio.run(main())
    finally:
        judge.close()


def test_a_judge_grades_the_reply_it_is_shown(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with Server("I would say 7 of 10: 7.5") as server:
        assert ask(server) == [0.75]
    path, key, body = server.asked[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body["model"] == "m" and body["messages"] == [{"role": "user", "content": "q reply 0"}]


def test_a_busy_server_and_an_answer_without_a_grade_are_asked_again():
    with Server(429, 503, "hm", "40", "4") as server:
        assert ask(server, retries=4) == [0.4]
    assert len(server.asked) == 5


def test_a_judge_that_stays_away_is_an_error_and_no_zero():
    with Server(500) as server, pytest.raises(JudgeFailed, match="HTTP 500"):
        ask(server, retries=2)
    assert len(server.asked) == 3
    with pytest.raises(JudgeFailed, match="Connection"):
        ask(server, retries=1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "the judge's content is None"),
        ("3/5", r"no grade from 0 to 10 in '3/5'"),
        ("8/10, or 3/10", "no grade from 0 to 10 in '8/10, or 3/10'"),
        ("", "no grade from 0 to 10 in ''"),
    ],
)
def test_what_a_judge_says_without_a_grade_fails_the_sample_with_its_text(answer, message):
    with Server(answer) as server, pytest.raises(JudgeFailed, match=message):
        ask(server, retries=0)


def test_a_refused_request_is_not_repeated():
    with Server(401) as server, pytest.raises(JudgeFailed, match="HTTP 401"):
        ask(server, retries=5)
    assert len(server.asked) == 1


def test_no_more_requests_are_open_than_allowed():
    with Server("5", hold=threading.Barrier(2)) as server:
        assert ask(server, num=8, max_concurrent=2) == [0.5] * 8
    assert server.most == 2


def test_a_prompt_without_the_reply_is_refused():
    with pytest.raises(ValueError, match=r"does not contain \{reply\}"):
        Judge(url="http://x/v1", model="m", prompt="grade")


ADD = "def add(a, b):\n    return a + b"


def passed(program, statements, **settings):
    return asyncio.run(statements_passed(Sandbox(**settings), program, statements))


def test_code_is_judged_by_the_tests_it_passes():
    tests = ["assert add(1, 2) == 3", "assert add(1, 1) == 2", "x = add('a', 'b')\nassert x == 'c'", "add(1)"]
    assert passed(ADD, tests) == 0.5
    assert passed("def add(a, b): return (", tests) == 0.0


def test_code_cannot_pass_by_leaving_early_or_by_printing():
    tests = ["assert add(1, 2) == 4"]
    assert passed(f"{ADD}\nimport sys; print('passed'); sys.exit(0)", tests) == 0.0
    assert passed(f"{ADD}\nprint = None", ["assert add(1, 2) == 3"]) == 1.0


def test_code_that_hangs_fails_what_it_did_not_reach():
    tests = ["assert add(1, 2) == 3", "while True: pass", "assert add(1, 2) == 3"]
    assert passed(ADD, tests, timeout_s=1.0) == pytest.approx(1 / 3)


def test_programs_are_judged_by_their_output():
    program = "print(int(input()) + 1, end=' \\n')"
    assert asyncio.run(
        outputs_equal(Sandbox(require_isolation=False), program, [("1", "2\n"), ("2", "3"), ("x", "y")])
    ) == pytest.approx(2 / 3)


def test_the_last_block_of_a_reply_is_its_code():
    assert code_of("First\n```python\na = 1\n```\nno:\n```\nb = 2\n```\ndone") == "b = 2\n"
    assert code_of("a = 1") == "a = 1"


def test_expressions_are_equal_in_any_form():
    pytest.importorskip("math_verify")
    pairs = [("so $\\frac{2}{4}$", "0.5"), ("it is $x^2+2x+1$", "$(x+1)^2$"), ("$\\frac13$", "0.5"), ("none", "7")]

    async def main():
        workers = Workers(num=1, timeout_s=60.0)
        try:
            return [await workers.call(math_equals, *pair) for pair in pairs]
        finally:
            await workers.close()

    assert asyncio.run(main()) == [1.0, 1.0, 0.0, 0.0]


def test_an_answer_without_an_expression_is_an_error_of_the_data():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="no mathematical expression in the answer ''"):
        math_equals("7", "")
