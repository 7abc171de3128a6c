"""OpenAI's chat completions over HTTP, one URL for each episode: whoever talks to it plays the episode.

Every request renders its messages in the model's chat template: what goes on from the tokens so far is appended to
them, anything else starts a new segment (or is refused, by option).  So the ids and log-probs that were sampled are
what is trained, whatever the client does with the text; a tool call that it sends back is rendered as it was sampled.
The requests of one episode are answered one after the other, with the run's own sampling settings; one whose client
hangs up is given up.  A streamed reply comes in one piece.  Text only, one choice.  FIELDS says which fields of the API
are used and which are ignored; all others are refused by name.  A reply that ends at a stop string is handed out up to
it, and goes on as it was sampled.  Knows nothing of rewards or of who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError

from spmd_rl.envs.chat import Chat
from spmd_rl.envs.environment import Generate
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import Completion, NotRetried, Rollout, Task

T = TypeVar("T")
LARGEST_HEAD = 1 << 14  # bytes of a request's first line and headers together
LARGEST_BODY = 1 << 22  # bytes of a request; parsing holds the event loop for some 30 ms a MiB
MOST_READING = 256  # connections that have not sent all of their request
READ_S, WRITE_S = 30.0, 60.0  # a request is read, an answer is taken, within these
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    408: "Request Timeout",
    411: "Length Required",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)  # as Hermes and Qwen models write them
_THOUGHT = re.compile(r".*</think>|<think>(?!.*</think>).*", re.DOTALL)  # its beginning may stand in the prompt


class _Anything:
    def __contains__(self, value: object) -> bool:
        return True


MODEL = "policy"
USED = None
IGNORED = _Anything()
# Fields of the API: what is used, what is ignored because the run's own settings hold or because it asks for nothing,
# and the values that ask for nothing of what is not offered.  Every other field or value is refused.
FIELDS: Mapping[str, Container[Any] | None] = {
    **dict.fromkeys(("messages", "max_tokens", "max_completion_tokens", "stop", "stream", "tools", "logprobs"), USED),
    **dict.fromkeys(("temperature", "top_p", "top_k", "seed"), IGNORED),  # [rollout] and [eval] of the config
    **dict.fromkeys(("model", "user", "metadata", "store", "stream_options", "service_tier"), IGNORED),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "parallel_tool_calls"), IGNORED),
    "n": (1,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
}


class Refused(Exception):
    """A request that is answered with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class _Episode:
    chat: Chat
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one request at a time
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    error: NotRetried | None = None  # that a request ended in
    calls: dict[str, str] = field(default_factory=dict)  # first tool call's id -> the reply as it was sampled
    cut: dict[tuple[int, str], str] = field(default_factory=dict)  # place and text up to a stop string -> the same


class ChatServer:
    """One server on this host's loopback for all episodes; each has a path of its own."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        on_rewrite: str = "segment",  # as in spmd_rl.envs.chat
    ) -> None:
        self._tokenizer, self._on_rewrite = tokenizer, on_rewrite
        self._episodes: dict[str, _Episode] = {}  # by the secret in their path
        self._starting = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self._num_reading = 0

    async def episode(self, task: Task, generate: Generate, play: Callable[[str], Awaitable[T]]) -> tuple[Rollout, T]:
        """What was sampled for those who asked at the URL that `play` is given, and what it returned."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=LARGEST_HEAD)
        port = self._server.sockets[0].getsockname()[1]
        secret = secrets.token_urlsafe(16)
        chat = Chat(tokenizer=self._tokenizer, task=task, generate=generate, messages=[], on_rewrite=self._on_rewrite)
        episode = self._episodes[secret] = _Episode(chat)
        try:
            result = await play(f"http://127.0.0.1:{port}/{secret}/v1")
        except Exception:  # of the program, which may be the end of a request that failed: that one is raised below
            if episode.error is None:
                raise
        finally:
            del self._episodes[secret]
            for request in episode.requests:
                request.cancel()
            if episode.requests:
                await asyncio.wait(episode.requests)  # what they have sampled is counted by then
        if episode.error is not None:
            raise episode.error
        return chat.rollout, result

    async def close(self) -> None:
        """Waits for no client."""
        if self._server is not None:
            self._server.close()
            for connection in self._connections:
                connection.cancel()
            await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection."""
        connection = _this_task()
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        try:
            status, kind, body = await self._answer(reader)
            head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            async with asyncio.timeout(WRITE_S):
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, TimeoutError):
            writer.transport.abort()  # the client or the episode has gone; asyncio's callback fails at cancelled tasks
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
        status = 200
        try:
            method, secret, rest, body = await self._read(reader)
            if (method, rest) == ("GET", "v1/models"):
                return status, "application/json", json.dumps({"object": "list", "data": [_model()]}).encode()
            if (method, rest) == ("GET", f"v1/models/{MODEL}"):
                return status, "application/json", json.dumps(_model()).encode()
            if (method, rest) != ("POST", "v1/chat/completions"):
                raise Refused(404, f"nothing at {method} {rest!r}: POST v1/chat/completions and GET v1/models are here")
            answer = await _unless_gone(reader, self._complete(self._episodes[secret], body))
            if body.get("stream"):
                return status, "text/event-stream", _streamed(answer)
        except Refused as refused:
            status, answer = refused.status, _error(refused)
        except (ConnectionError, asyncio.IncompleteReadError):
            raise
        except (ValueError, TypeError, LookupError, AttributeError, TemplateError, NotRetried) as error:
            status, answer = 400, _error(error)
        except Exception as error:  # the engine's or the episode's: the program learns it
            status, answer = 500, _error(error)
        return status, "application/json", json.dumps(answer).encode()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, str, str, dict[str, Any]]:
        """Method, secret, the rest of the path, and the JSON body of a POST; nothing is read without a secret."""
        if self._num_reading >= MOST_READING:
            raise Refused(503, f"{MOST_READING} connections are open that have not sent their request")
        self._num_reading += 1
        try:
            async with asyncio.timeout(READ_S):
                method, path = await _first_line(reader)
                secret, _, rest = path.removeprefix("/").partition("/")
                if secret not in self._episodes:
                    raise Refused(404, f"nothing at {rest[:100]!r}, or the episode has ended")
                headers = await _headers(reader)
                return method, secret, rest, await _body(reader, headers) if method == "POST" else {}
        except asyncio.LimitOverrunError:
            raise Refused(431, f"a line of more than {LARGEST_HEAD} bytes") from None
        except TimeoutError:
            raise Refused(408, f"the request was not there within {READ_S:.0f} s") from None
        finally:
            self._num_reading -= 1

    async def _complete(self, episode: _Episode, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = _Asked.of(body)
        chat, request = episode.chat, _this_task()
        episode.requests.add(request)
        request.add_done_callback(episode.requests.discard)
        async with episode.lock:
            chat.messages = [_plain(message, at, episode) for at, message in enumerate(body["messages"])]
            chat.variables = {"tools": asked.tools or None}
            before = chat.rollout.num_trainable
            try:
                text = await chat.reply(asked.max_tokens, stop=asked.stop)
            except NotRetried as error:
                episode.error = error
                raise
            num_sampled, num_context = chat.rollout.num_trainable - before, len(chat.rollout.context)
            shown = before_stop(text, asked.stop)
            content, calls = tool_calls(shown) if asked.tools else (shown, [])
            sampled = str(chat.messages[-1]["content"])
            if calls:
                episode.calls[calls[0]["id"]] = sampled
            if shown != text:
                episode.cut[len(chat.messages) - 1, content] = sampled
        if chat.truncated and not num_sampled:  # in words that clients look for
            raise Refused(400, f"this model's maximum context length is reached by the {num_context} tokens so far")
        finish_reason = "length" if chat.truncated else "tool_calls" if calls else "stop"
        message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        logprobs = None
        if asked.logprobs:
            assert chat.completion is not None
            logprobs = {"content": self._logprobs(chat.completion)}
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model", MODEL),
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": logprobs}],
            "usage": {
                "prompt_tokens": num_context - num_sampled,
                "completion_tokens": num_sampled,
                "total_tokens": num_context,
            },
        }

    def _logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        """Of every sampled token, the stop token and what was cut off at a stop string among them."""
        entries = []
        for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            text = self._tokenizer.decode([token_id], special=True)
            entries.append({"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []})
        return entries


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a request asks for, as far as it is offered; `of` raises Refused, naming the field, for anything else."""

    max_tokens: int | None
    stop: tuple[str, ...]
    tools: list[Any]
    logprobs: bool

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> _Asked:
        if unknown := body.keys() - FIELDS.keys():
            raise Refused(400, f"{', '.join(sorted(unknown))}: not offered by this server")
        for name, neutral in FIELDS.items():
            if neutral is not USED and body.get(name) is not None and body[name] not in neutral:
                raise Refused(400, f"{name} = {json.dumps(body[name])[:200]}: not offered by this server; leave it out")
        limit = body.get("max_completion_tokens")
        limit = body.get("max_tokens") if limit is None else limit
        if limit is not None and (type(limit) is not int or limit < 1):
            raise Refused(400, f"max_tokens = {limit!r}: must be a whole number of at least 1")
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise Refused(400, f"stop = {body['stop']!r}: must be a text or a list of texts")
        tools = body.get("tools") or []
        return cls(
            max_tokens=limit,
            stop=tuple(stop),
            tools=[] if body.get("tool_choice") == "none" else tools,
            logprobs=bool(body.get("logprobs")),
        )


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Text up to the first stop string."""
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]


def tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What a reply says beside its calls, and the calls in OpenAI's form; a call that is none leaves all of it text.

    What stands in <think> … </think> is no call; nor is anything after a <think> that does not end.
    """
    thought = max((match.end() for match in _THOUGHT.finditer(text)), default=0)
    calls = []
    for written in _CALL.findall(text, thought):
        try:
            call = json.loads(written)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return text, []
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": str(name), "arguments": arguments}
        calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
    return ((text[:thought] + _CALL.sub("", text[thought:])).strip(), calls) if calls else (text, calls)


def _plain(message: Mapping[str, Any], at: int, episode: _Episode) -> dict[str, Any]:
    """A message as templates take it: its content one text, and a reply of the policy as it was sampled."""
    calls = message.get("tool_calls") or []
    if calls and calls[0].get("id") in episode.calls:
        return {"role": "assistant", "content": episode.calls[calls[0]["id"]]}
    if calls:
        message = {**message, "tool_calls": [_with_object(call) for call in calls]}
    content = message.get("content") or ""
    if isinstance(content, list):
        if other := {part.get("type") for part in content} - {"text"}:
            raise Refused(400, f"a message with parts of type {', '.join(sorted(map(str, other)))}: only text")
        content = "".join(part["text"] for part in content)
    if message.get("role") == "assistant":
        content = episode.cut.get((at, content), content)
    return {**{key: value for key, value in message.items() if value is not None}, "content": content}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object, which templates write as JSON themselves."""
    function = dict(call["function"])
    with contextlib.suppress(ValueError, TypeError, RecursionError):  # no JSON, or an object already
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _streamed(answer: Mapping[str, Any]) -> bytes:
    """The same as server-sent events: the whole reply, how it ended, its usage."""
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {"choices": [], "usage": answer["usage"]},
    ]
    common = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    return "".join(f"data: {line}\n\n" for line in [*(json.dumps(common | p) for p in parts), "[DONE]"]).encode()


async def _first_line(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Method and path."""
    words = (await reader.readuntil(b"\r\n")).decode("latin-1").split()
    if len(words) != 3:
        raise Refused(400, "a request begins with method, path and version")
    return words[0], words[1]


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    """By their names in lower case."""
    headers, num_bytes = {}, 0
    while line := (await reader.readuntil(b"\r\n")).strip():
        num_bytes += len(line)
        if num_bytes > LARGEST_HEAD:
            raise Refused(431, f"headers of more than {LARGEST_HEAD} bytes")
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> dict[str, Any]:
    if not (length := headers.get("content-length", "")).isdecimal():
        raise Refused(411, "a POST needs a Content-Length in bytes")
    if len(length) > 12 or int(length) > LARGEST_BODY:
        raise Refused(413, f"a body of {length[:20]} bytes, {LARGEST_BODY} are taken")
    try:
        body = json.loads(await reader.readexactly(int(length)))
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is no JSON object")
    return body


def _model() -> dict[str, object]:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "spmd_rl"}


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None  # only coroutines ask
    return task


async def _unless_gone(reader: asyncio.StreamReader, answer: Coroutine[Any, Any, T]) -> T:
    """The answer to a request that has been read; cancelled with this task as soon as the client hangs up."""
    request = _this_task()

    async def give_up() -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(LARGEST_BODY):
                pass  # nothing is expected any more
        request.cancel()

    watch = asyncio.create_task(give_up())
    try:
        return await answer
    finally:
        watch.cancel()


def _error(error: Exception) -> dict[str, object]:
    return {"error": {"message": str(error), "type": type(error).__name__}}
