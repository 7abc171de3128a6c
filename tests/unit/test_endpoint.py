import asyncio
import http.client
import json
import urllib.error
import urllib.request
from itertools import count

import numpy as np
import pytest

from spmd_rl import envs
from spmd_rl.envs.chat_server import ChatServer, tool_calls
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.ranks.episodes import PromptTooLong
from spmd_rl.types import Completion, Task
from tests.says import CHATML, Says, trained_text, write_folder

CALL = '<tool_call>{"name": "f"}</tool_call>'


def tasks(seed, split):
    return (Task(env="", task_id=str(i)) for i in count())


def post(url, body):
    """As a client would, in a thread: status and answer."""
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=20.0) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def two_turns(url, data):
    messages = [{"role": "user", "content": "go"}]
    _, answer = await asyncio.to_thread(post, url, {"model": "m", "messages": messages, "max_tokens": 7})
    data["answers"].append(answer)
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "on"}]
    _, answer = await asyncio.to_thread(post, url, {"model": "m", "messages": messages, "n": None})
    data["answers"].append(answer)
    return {"first": 1.0, "second": 0.5}


async def another_conversation(url, data):
    for text in ("one", "two"):
        await asyncio.to_thread(post, url, {"messages": [{"role": "user", "content": text}]})
    return 1.0


async def mistakes(url, data):
    base = {"messages": [{"role": "user", "content": "x"}]}
    for at, body in (
        (url, base | {"n": 2}),
        (url, base | {"max_tokens": 512.0}),
        (url, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (url, {"messages": 7}),
        (url, [1]),
        (url + "/models", base),
        (url.replace("/v1", "x/v1"), base),
    ):
        data["answers"].append(await asyncio.to_thread(post, at, body))
    data["url"] = url
    return 0.0


async def at_once(url, data):
    bodies = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(3)]
    await asyncio.gather(*(asyncio.to_thread(post, url, body) for body in bodies))
    return 1.0


def play(tmp_path, program, *turns, then=None):
    tokenizer = Tokenizer(write_folder(tmp_path))
    args = {"program": f"tests.unit.test_endpoint:{program}", "tasks": "tests.unit.test_endpoint:tasks"}
    env = envs.load("spmd_rl.envs.endpoint:Endpoint", tokenizer=tokenizer, args=args)
    policy, data = Says(tokenizer, *turns), {"answers": []}

    async def main():
        try:
            rollout = await env.rollout(Task(env="", task_id="t", data=data), policy)
            return rollout, then and await asyncio.to_thread(then, data)
        finally:
            await env.close()

    rollout, after = asyncio.run(main())
    return tokenizer, policy, data["answers"], rollout, after


def test_a_conversation_over_http_keeps_the_sampled_ids(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path))
    he, llo, hello, end = (int(tokenizer.encode(text)[0]) for text in ("he", "llo", "hello", "<|end|>"))
    tokenizer, policy, answers, rollout, _ = play(tmp_path, "two_turns", [he, llo, end], "x<|end|>")
    assert [a["choices"][0]["message"]["content"] for a in answers] == ["hello", "x"]
    assert policy.asked[0][1] == 7
    assert answers[0]["choices"][0]["finish_reason"] == "stop" and answers[0]["usage"]["completion_tokens"] == 3
    assert rollout.segments == [] and hello not in rollout.token_ids.tolist()
    assert rollout.token_ids[rollout.loss_mask].tolist()[:3] == [he, llo, end]
    assert trained_text(tokenizer, rollout) == "hello<|end|>x<|end|>"
    assert rollout.behavior_logprobs[rollout.loss_mask].tolist() == [-0.5] * 5
    assert (rollout.reward, rollout.reward_parts, rollout.num_turns) == (1.5, {"first": 1.0, "second": 0.5}, 2)


def test_another_conversation_in_the_same_episode_is_a_segment(tmp_path):
    tokenizer, policy, _, rollout, _ = play(tmp_path, "another_conversation", "a<|end|>", "b<|end|>")
    assert len(rollout.segments) == 1 and "one" not in policy.asked[1][0]
    assert trained_text(tokenizer, rollout) == "a<|end|>b<|end|>"


def test_requests_at_once_are_answered_one_after_the_other(tmp_path):
    tokenizer, _, _, rollout, _ = play(tmp_path, "at_once", "a<|end|>", "b<|end|>", "c<|end|>")
    assert len(rollout.segments) == 2 and trained_text(tokenizer, rollout) == "a<|end|>b<|end|>c<|end|>"


def test_what_is_not_offered_is_refused_and_an_ended_episode_is_gone(tmp_path):
    def afterwards(data):
        return post(data["url"], {"messages": []})

    _, _, answers, rollout, after = play(tmp_path, "mistakes", then=afterwards)
    assert [status for status, _ in answers] == [400, 400, 400, 400, 400, 404, 404]
    messages = [answer["error"]["message"] for _, answer in answers]
    assert messages[:3] == [
        "n = 2: not offered by this server; leave it out",
        "max_tokens = 512.0: must be a whole number of at least 1",
        "a message with parts of type image_url: only text",
    ]
    assert rollout.num_turns == 0 and after[0] == 404


async def hangs_up(url, data):
    sent = asyncio.create_task(asyncio.to_thread(post, url, {"messages": [{"role": "user", "content": "x"}]}))
    await data["begun"].wait()
    data["sent"] = sent
    raise KeyError("mine")


def endpoint(tmp_path, program):
    args = {"program": f"tests.unit.test_endpoint:{program}", "tasks": "tests.unit.test_endpoint:tasks"}
    tokenizer = Tokenizer(write_folder(tmp_path))
    return envs.load("spmd_rl.envs.endpoint:Endpoint", tokenizer=tokenizer, args=args)


def test_an_episode_that_ends_takes_its_requests_along(tmp_path):
    cancelled, failures = [], []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        begun, env = asyncio.Event(), endpoint(tmp_path, "hangs_up")

        async def generate(token_ids, max_tokens=None):
            begun.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.append(True)

        data = {"begun": begun}
        with pytest.raises(KeyError, match="mine"):
            await env.rollout(Task(env="", task_id="t", data=data), generate)
        assert cancelled == [True]  # before the episode has ended
        with pytest.raises((OSError, http.client.HTTPException)):
            await data["sent"]
        await env.close()

    asyncio.run(main())
    assert failures == []


async def hangs_up_and_asks_again(url, data):
    host, port = url.split("/")[2].split(":")
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /{url.split('/', 3)[3]}/chat/completions HTTP/1.1\r\n".encode())
    writer.write(f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
    await data["begun"].wait()
    writer.close()
    await writer.wait_closed()
    await asyncio.to_thread(post, url, json.loads(body))
    return 1.0


def test_a_client_that_hangs_up_takes_its_request_along_and_what_nobody_read_is_not_trained(tmp_path):
    async def main():
        begun, env = asyncio.Event(), endpoint(tmp_path, "hangs_up_and_asks_again")
        tokenizer = Tokenizer(tmp_path)
        policy, cancelled = Says(tokenizer, "b<|end|>"), []

        async def generate(token_ids, max_tokens=None):
            if begun.is_set():
                return await policy(token_ids, max_tokens)
            begun.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.append(True)

        rollout = await env.rollout(Task(env="", task_id="t", data={"begun": begun}), generate)
        await env.close()
        assert cancelled == [True] and rollout.segments == []
        assert trained_text(tokenizer, rollout) == "b<|end|>"

    asyncio.run(main())


async def hangs_up_in_the_middle(url):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split("/")[2].split(":")[1]))
    writer.write(f"POST /{url.split('/')[3]}/v1/chat/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{{".encode())
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


def test_half_a_request_is_not_answered(tmp_path):
    async def main():
        server = ChatServer(tokenizer=Tokenizer(write_folder(tmp_path)))
        _, answer = await server.episode(Task(env="", task_id="t"), None, hangs_up_in_the_middle)
        await server.close()
        assert answer == b""

    asyncio.run(main())


def test_a_call_that_the_policy_did_not_sample_is_rendered_with_its_arguments_as_an_object(tmp_path):
    template = CHATML.replace("message['content']", "(message.tool_calls or message['content']) | tojson")
    tokenizer = Tokenizer(write_folder(tmp_path, template=template))
    policy = Says(tokenizer, "b<|end|>")

    async def program(url):
        calls = [{"type": "function", "function": {"name": "f", "arguments": a}} for a in ('{"x": 1}', "no JSON")]
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
        return await asyncio.to_thread(post, url, {"messages": messages})

    async def main():
        server = ChatServer(tokenizer=tokenizer)
        _, (status, _) = await server.episode(Task(env="", task_id="t"), policy, program)
        await server.close()
        assert status == 200

    asyncio.run(main())
    ((prompt, _),) = policy.asked
    assert '"arguments": {"x": 1}}' in prompt and '"arguments": "no JSON"}' in prompt


async def asks_once(url, data):
    status, _ = await asyncio.to_thread(post, url, {"messages": [{"role": "user", "content": "x"}]})
    raise RuntimeError(f"HTTP {status}")


def test_the_error_behind_a_request_is_that_of_the_episode(tmp_path):
    async def generate(token_ids, max_tokens=None):
        raise PromptTooLong("9 tokens")

    async def main():
        env = endpoint(tmp_path, "asks_once")
        with pytest.raises(PromptTooLong, match="9 tokens"):
            await env.rollout(Task(env="", task_id="t"), generate)
        await env.close()

    asyncio.run(main())


async def goes_on_when_refused(url, data):
    status, answer = await asyncio.to_thread(post, url, {"messages": [{"role": "user", "content": "x"}]})
    data["answers"].append((status, answer["error"]["message"]))
    return 1.0


def test_a_program_that_goes_on_after_such_an_error_fails_all_the_same(tmp_path):
    async def generate(token_ids, max_tokens=None):
        raise PromptTooLong("9 tokens")

    async def main():
        env, data = endpoint(tmp_path, "goes_on_when_refused"), {"answers": []}
        with pytest.raises(PromptTooLong, match="9 tokens"):
            await env.rollout(Task(env="", task_id="t", data=data), generate)
        await env.close()
        assert data["answers"] == [(400, "9 tokens")]

    asyncio.run(main())


def test_a_context_that_is_used_up_ends_a_conversation_in_words_that_clients_know(tmp_path):
    async def generate(token_ids, max_tokens=None):
        none = np.empty(0, np.int32)
        return Completion(token_ids=none, logprobs=np.empty(0, np.float32), versions=none, finish_reason="length")

    async def main():
        env, data = endpoint(tmp_path, "goes_on_when_refused"), {"answers": []}
        rollout = await env.rollout(Task(env="", task_id="t", data=data), generate)
        await env.close()
        assert (rollout.reward, rollout.finish_reason) == (1.0, "length")
        ((status, message),) = data["answers"]
        assert status == 400 and message.startswith("this model's maximum context length is reached by the ")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "content", "called"),
    [
        ("no call", "no call", []),
        ('a <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> b', "a  b", [("f", '{"x": 1}')]),
        (
            '<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
        ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', []),
        ("<tool_call>{}", "<tool_call>{}", []),
        (f"<tool_call>{'[' * 5000}</tool_call>", f"<tool_call>{'[' * 5000}</tool_call>", []),
        (f"<think>maybe {CALL} no</think>The answer is 4.", f"<think>maybe {CALL} no</think>The answer is 4.", []),
        (f"maybe {CALL} no</think>The answer is 4.", f"maybe {CALL} no</think>The answer is 4.", []),
        (f"<think>maybe {CALL} and then", f"<think>maybe {CALL} and then", []),
        (f"<think>a</think>b<think>{CALL}", f"<think>a</think>b<think>{CALL}", []),
        (f"<think>{CALL}</think>so {CALL}", f"<think>{CALL}</think>so", [("f", "{}")]),
        (f"<think>a</think>{CALL}<think>b</think>", f"<think>a</think>{CALL}<think>b</think>", []),
    ],
)
def test_tool_calls_are_told_from_what_is_said_beside_them(text, content, called):
    said, calls = tool_calls(text)
    assert said == content
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == called
    assert len({call["id"] for call in calls}) == len(calls)


async def one_request(url, data):
    data["answers"].append(await asyncio.to_thread(post, url, data["body"]))
    return 1.0


def ask(tmp_path, *turns, **body):
    """Status and answer of one request, and the policy that was asked."""
    tokenizer = Tokenizer(write_folder(tmp_path))
    args = {"program": "tests.unit.test_endpoint:one_request", "tasks": "tests.unit.test_endpoint:tasks"}
    env = envs.load("spmd_rl.envs.endpoint:Endpoint", tokenizer=tokenizer, args=args)
    data = {"answers": [], "body": {"messages": [{"role": "user", "content": "go"}], **body}}
    policy = Says(tokenizer, *turns)

    async def main():
        try:
            await env.rollout(Task(env="", task_id="t", data=data), policy)
        finally:
            await env.close()

    asyncio.run(main())
    return (*data["answers"][0], policy)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BY_NAME = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": BY_NAME}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 7}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{}]}, "functions"),
        ({"max_token": 7}, "max_token"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(tmp_path, body, name):
    status, answer, policy = ask(tmp_path, **body)
    assert status == 400 and policy.asked == []
    assert answer["error"]["message"].startswith(name)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}, "tool_choice": "auto", "n": 1, "logit_bias": {}, "top_logprobs": 0},
        {"temperature": 0.1, "top_p": 0.5, "seed": 1, "user": "me", "model": "any", "frequency_penalty": 0.0},
        {"stop": None, "logprobs": False, "max_tokens": None, "tools": None, "tool_choice": None},
        {"stop": []},
    ],
)
def test_what_asks_for_nothing_else_is_answered(tmp_path, body):
    status, answer, _ = ask(tmp_path, "hello<|end|>", **body)
    assert status == 200 and answer["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert answer["choices"][0]["logprobs"] is None


def test_log_probs_are_those_that_were_sampled(tmp_path):
    _, answer, _ = ask(tmp_path, "hello<|end|>", logprobs=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [(e["token"], e["logprob"], e["top_logprobs"]) for e in entries] == [
        ("hello", -0.5, []),
        ("<|end|>", -0.5, []),
    ]


def test_without_tools_to_choose_a_call_is_text(tmp_path):
    _, answer, _ = ask(tmp_path, CALL + "<|end|>", tools=[TOOL], tool_choice="none")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL}


async def stops_and_goes_on(url, data):
    messages = [{"role": "user", "content": "go"}]
    for stop in (["ll"], "z"):
        _, answer = await asyncio.to_thread(post, url, {"messages": messages, "stop": stop})
        data["answers"].append(answer["choices"][0])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "on"}]
    return 1.0


def test_a_reply_is_handed_out_up_to_its_stop_string_and_goes_on_as_it_was_sampled(tmp_path):
    tokenizer, policy, answers, rollout, _ = play(tmp_path, "stops_and_goes_on", "hell", "x<|end|>")
    assert policy.stops == [("ll",), ("z",)]
    assert [(a["message"]["content"], a["finish_reason"]) for a in answers] == [("he", "stop"), ("x", "stop")]
    assert rollout.segments == []
    assert trained_text(tokenizer, rollout) == "hellx<|end|>"
    assert "hell<|end|>" in tokenizer.decode(rollout.token_ids, special=True)


async def asks_for_models(url, data):
    def get(path):
        with urllib.request.urlopen(url + path, timeout=20.0) as response:
            return json.load(response)

    data["answers"] += [await asyncio.to_thread(get, path) for path in ("/models", "/models/policy")]
    return 1.0


def test_the_model_is_listed(tmp_path):
    _, _, (models, model), _, _ = play(tmp_path, "asks_for_models")
    assert models == {"object": "list", "data": [model]}
    assert (model["id"], model["object"]) == ("policy", "model")


def test_a_program_that_does_not_exist_is_said(tmp_path):
    args = {"program": "tests.unit.test_endpoint:gone", "tasks": "tests.unit.test_endpoint:tasks"}
    with pytest.raises(ValueError, match="no attribute 'gone'"):
        envs.load("spmd_rl.envs.endpoint:Endpoint", tokenizer=None, args=args)


# ---- clients that mean no good


async def sent(port, data, *, then=b"", end=False):
    """The status that raw bytes are answered with; None where the connection is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in (data, then):
            writer.write(piece)
            await writer.drain()
        if end:
            writer.write_eof()
        line = await asyncio.wait_for(reader.readline(), 20)
        return int(line.split()[1]) if line else None
    except ConnectionError:
        return None
    finally:
        writer.close()


def attacked(tmp_path, attack):
    """What `attack(server, port, secret)` returns, made while an episode is open."""
    tokenizer = Tokenizer(write_folder(tmp_path))
    server = ChatServer(tokenizer=tokenizer)

    async def main():
        async def program(url):
            port, secret = url.removeprefix("http://127.0.0.1:").split("/")[:2]
            return await attack(server, int(port), secret)

        try:
            _, result = await server.episode(Task(env="e", task_id="t"), Says(tokenizer, "yes<|end|>"), program)
        finally:
            await asyncio.wait_for(server.close(), 5)
        return result

    return asyncio.run(main())


MANY = b"".join(b"h%d: %s\r\n" % (i, b"x" * 1000) for i in range(100))
BODY = b'{"messages": [{"role": "user", "content": "x"}]}'
CALLED = b'{"function": {"name": "f", "arguments": "%s"}}' % (b"[" * 5000)
DEEP = b'{"messages": [{"role": "assistant", "tool_calls": [%s]}]}' % CALLED


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /%(secret)s/v1/chat/completions HTTP/1.1\r\nContent-Length: %(length)d\r\n\r\n" + BODY, 200),
        (b"POST /%%(secret)s/v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(DEEP) + DEEP, 200),
        (b"GET /wrong/v1/models HTTP/1.1\r\n", 404),  # answered before a header is read
        (b"GET / HTTP/1.1\r\n", 404),
        (b"hello\r\n", 400),
        (b"GET /%(secret)s/" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /%(secret)s/v1/models HTTP/1.1\r\n" + MANY + b"\r\n", 431),
        (b"GET /%(secret)s/v1/models HTTP/1.1\r\nh: " + b"x" * 20_000 + b"\r\n\r\n", 431),
        (b"POST /%(secret)s/v1/chat/completions HTTP/1.1\r\n\r\n", 411),
        (b"POST /%(secret)s/v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST /%(secret)s/v1/chat/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 411),
        (b"POST /%(secret)s/v1/chat/completions HTTP/1.1\r\nContent-Length: 5000000\r\n\r\n", 413),
        (b"POST /%(secret)s/v1/chat/completions HTTP/1.1\r\nContent-Length: " + b"9" * 9000 + b"\r\n\r\n", 413),
        (b"POST /%(secret)s/v1/chat/completions HTTP/1.1\r\nContent-Length: 3\r\n\r\n{x}", 400),
        (b"POST /%(secret)s/v1/chat/completions HTTP/1.1\r\nContent-Length: 20000\r\n\r\n" + b"[" * 20_000, 400),
        (b"POST /%(secret)s/v1/chat/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n\xff\xfe", 400),
    ],
)
def test_a_request_is_answered_or_refused_within_limits(tmp_path, head, status):
    async def attack(server, port, secret):
        return await sent(port, head % {b"secret": secret.encode(), b"length": len(BODY)} if b"%(" in head else head)

    assert attacked(tmp_path, attack) == status


def test_a_client_that_sends_nothing_is_let_go_and_too_many_are_turned_away(tmp_path, monkeypatch):
    monkeypatch.setattr("spmd_rl.envs.chat_server.READ_S", 0.3)
    monkeypatch.setattr("spmd_rl.envs.chat_server.MOST_READING", 3)

    async def attack(server, port, secret):
        idle = [asyncio.create_task(sent(port, b"GET /")) for _ in range(3)]
        await asyncio.sleep(0.1)
        turned_away = await sent(port, b"GET / HTTP/1.1\r\n")
        answers = await asyncio.gather(*idle)
        return turned_away, answers, await sent(port, f"GET /{secret}/v1/models HTTP/1.1\r\n\r\n".encode())

    assert attacked(tmp_path, attack) == (503, [408] * 3, 200)


def test_closing_waits_for_no_client(tmp_path):
    async def attack(server, port, secret):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(server.close(), 5)
        for _, writer in idle:
            writer.close()
        return [await reader.read() for reader, _ in idle]

    assert attacked(tmp_path, attack) == [b""] * 5
