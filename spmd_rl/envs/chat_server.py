"""OpenAI's chat completions over HTTP, one URL for each episode: whoever talks to it plays the episode.

Every request renders its messages in the model's chat template: what goes on from the tokens so far is appended to
them, anything else starts a new segment (or is refused, by option).  So the ids and log-probs that were sampled are
what is trained, whatever the client does with the text; a tool call that it sends back is rendered as it was sampled.
The requests of one episode are answered one after the other, with the run's own sampling settings; one whose client
hangs up is given up.  A streamed reply comes in one piece.  Text only, one choice.  Knows nothing of rewards or of who
asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError

from spmd_rl.envs import Generate
from spmd_rl.envs.chat import Chat
from spmd_rl.tokenizer import Tokenizer
from spmd_rl.types import NotRetried, Rollout, Task

T = TypeVar("T")
LARGEST_BODY = 1 << 24  # bytes of a request
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)  # as Hermes and Qwen models write them


class Refused(Exception):
    """A request that is answered with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class _Episode:
    chat: Chat
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one request at a time
    requests: set[asyncio.Task] = field(default_factory=set)
    error: NotRetried | None = None  # that a request ended in
    calls: dict[str, str] = field(default_factory=dict)  # first tool call's id -> the reply as it was sampled


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

    async def episode(self, task: Task, generate: Generate, play: Callable[[str], Awaitable[T]]) -> tuple[Rollout, T]:
        """What was sampled for those who asked at the URL that `play` is given, and what it returned."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
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
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection."""
        try:
            status, kind, body = await self._answer(reader)
            head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the episode; asyncio's own callback would fail at a cancelled task
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
        status = 200
        try:
            path, body = await _read(reader)
            secret, _, rest = path.removeprefix("/").partition("/")
            if secret not in self._episodes or rest != "v1/chat/completions":
                raise Refused(404, f"nothing at {rest!r}, or the episode has ended")
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

    async def _complete(self, episode: _Episode, body: Mapping[str, Any]) -> dict[str, Any]:
        chat, request = episode.chat, asyncio.current_task()
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if not isinstance(limit, int | None):
            raise Refused(400, f"max_tokens = {limit!r}: must be a whole number")
        if (body.get("n") or 1) != 1:
            raise Refused(400, f"n = {body['n']}: one choice a request")
        episode.requests.add(request)
        request.add_done_callback(episode.requests.discard)
        async with episode.lock:
            chat.messages = [_plain(message, episode.calls) for message in body["messages"]]
            chat.variables = {"tools": body.get("tools") or None}
            before = chat.rollout.num_trainable
            try:
                text = await chat.reply(limit)
            except NotRetried as error:
                episode.error = error
                raise
            num_sampled, num_context = chat.rollout.num_trainable - before, len(chat.rollout.context)
            content, calls = tool_calls(text) if chat.variables["tools"] else (text, [])
            if calls:
                episode.calls[calls[0]["id"]] = str(chat.messages[-1]["content"])
        if chat.truncated and not num_sampled:  # in words that clients look for
            raise Refused(400, f"this model's maximum context length is reached by the {num_context} tokens so far")
        finish_reason = "length" if chat.truncated else "tool_calls" if calls else "stop"
        message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model", "policy"),
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
            "usage": {
                "prompt_tokens": num_context - num_sampled,
                "completion_tokens": num_sampled,
                "total_tokens": num_context,
            },
        }


def tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What a reply says beside its calls, and the calls in OpenAI's form; a call that is none leaves all of it text."""
    calls = []
    for written in _CALL.findall(text):
        try:
            call = json.loads(written)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, LookupError, AttributeError):
            return text, []
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": str(name), "arguments": arguments}
        calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
    return (_CALL.sub("", text).strip(), calls) if calls else (text, calls)


def _plain(message: Mapping[str, Any], sampled: Mapping[str, str]) -> dict[str, Any]:
    """A message as templates take it: its content one text, and a call of the policy as it was sampled."""
    calls = message.get("tool_calls") or []
    if calls and calls[0].get("id") in sampled:
        return {"role": "assistant", "content": sampled[calls[0]["id"]]}
    if calls:
        message = {**message, "tool_calls": [_with_object(call) for call in calls]}
    content = message.get("content") or ""
    if isinstance(content, list):
        if other := {part.get("type") for part in content} - {"text"}:
            raise Refused(400, f"a message with parts of type {', '.join(sorted(map(str, other)))}: only text")
        content = "".join(part["text"] for part in content)
    return {**{key: value for key, value in message.items() if value is not None}, "content": content}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object, which templates write as JSON themselves."""
    function = dict(call["function"])
    with contextlib.suppress(ValueError, TypeError):  # no JSON, or an object already
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


async def _read(reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
    """Path and JSON body of a POST."""
    method, path, _ = (await reader.readuntil(b"\r\n")).decode("latin-1").split(" ", 2)
    headers = {}
    while line := (await reader.readuntil(b"\r\n")).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    length = int(headers.get("content-length", 0))
    if method != "POST" or not 0 < length <= LARGEST_BODY:
        raise Refused(404 if method != "POST" else 400, f"{method} with {length} bytes")
    body = json.loads(await reader.readexactly(length))
    if not isinstance(body, dict):
        raise Refused(400, "the body is no JSON object")
    return path, body


async def _unless_gone(reader: asyncio.StreamReader, answer: Coroutine[Any, Any, T]) -> T:
    """The answer to a request that has been read; cancelled with this task as soon as the client hangs up."""
    request = asyncio.current_task()

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
