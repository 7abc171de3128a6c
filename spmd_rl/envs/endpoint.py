"""Episodes by programs that speak OpenAI's chat completions: they get a URL, their tokens are recorded.

    [env.mine]
    path = "spmd_rl.envs.endpoint:Endpoint"
    args = { program = "my_pkg:play", tasks = "my_pkg:tasks" }

`async def play(base_url, data)` talks to `base_url` + "/chat/completions" as often as it likes, by any client, and
returns the reward or its parts; `tasks(seed, split)` are those of an environment.  Every request renders its messages
in the model's chat template: what goes on from the tokens so far is appended to them, anything else starts a new
segment (or is refused, by option).  So the ids and log-probs that were sampled are what is trained, whatever the client
does with the text.  The requests of one episode are answered one after the other.  Content only: no streaming, no
parsed tool calls, one choice.
"""

from __future__ import annotations

import asyncio
import json
import pkgutil
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from jinja2.exceptions import TemplateError

from spmd_rl.envs import Generate, judged
from spmd_rl.envs.chat import Chat, Rewritten
from spmd_rl.tokenizer import Tokenizer
from spmd_rl.types import NotRetried, Rollout, Task

LARGEST_BODY = 1 << 24  # bytes of a request
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}


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


class Endpoint:
    """One server on this host's loopback for all episodes; each has a path of its own."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        program: str,  # import path of `async def play(base_url, data)`
        tasks: str,  # import path of `def tasks(seed, split)`
        on_rewrite: str = "segment",  # as in spmd_rl.envs.chat
    ) -> None:
        try:
            self._program, self._tasks = pkgutil.resolve_name(program), pkgutil.resolve_name(tasks)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"endpoint: {error}") from error
        self._tokenizer, self._on_rewrite = tokenizer, on_rewrite
        self._episodes: dict[str, _Episode] = {}  # by the secret in their path
        self._starting = asyncio.Lock()
        self._server: asyncio.Server | None = None

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return self._tasks(seed, split)

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        secret = secrets.token_urlsafe(16)
        chat = Chat(tokenizer=self._tokenizer, task=task, generate=generate, messages=[], on_rewrite=self._on_rewrite)
        episode = self._episodes[secret] = _Episode(chat)
        try:
            reward = await self._program(f"http://127.0.0.1:{port}/{secret}/v1", task.data)
        except Exception:
            if episode.error is not None:
                raise episode.error from None
            raise
        finally:
            del self._episodes[secret]
            for request in episode.requests:
                request.cancel()
            if episode.requests:
                await asyncio.wait(episode.requests)  # what they have sampled is counted by then
        return judged(chat.rollout, reward)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection."""
        try:
            status, answer = await self._answer(reader)
            body = json.dumps(answer).encode()
            head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
        try:
            path, body = await _read(reader)
            secret, _, rest = path.removeprefix("/").partition("/")
            if secret not in self._episodes or rest != "v1/chat/completions":
                raise Refused(404, f"nothing at {rest!r}, or the episode has ended")
            return 200, await self._complete(self._episodes[secret], body)
        except Refused as refused:
            return refused.status, _error(refused)
        except (ValueError, TypeError, LookupError, TemplateError, Rewritten) as error:
            return 400, _error(error)
        except Exception as error:  # the engine's or the episode's: the program learns it
            return 500, _error(error)

    async def _complete(self, episode: _Episode, body: dict) -> dict[str, object]:
        chat, request = episode.chat, asyncio.current_task()
        if body.get("stream") or body.get("n", 1) != 1:
            raise Refused(400, "no streaming, one choice")
        episode.requests.add(request)
        request.add_done_callback(episode.requests.discard)
        async with episode.lock:
            chat.messages = list(body["messages"])
            chat.variables = {"tools": body.get("tools")}
            before = chat.rollout.num_trainable
            try:
                text = await chat.reply(body.get("max_completion_tokens") or body.get("max_tokens"))
            except NotRetried as error:
                episode.error = error
                raise
            num_sampled, num_context = chat.rollout.num_trainable - before, len(chat.rollout.context)
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model", "policy"),
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "length" if chat.truncated else "stop",
                    "logprobs": None,
                }
            ],
            "usage": {
                "prompt_tokens": num_context - num_sampled,
                "completion_tokens": num_sampled,
                "total_tokens": num_context,
            },
        }


async def _read(reader: asyncio.StreamReader) -> tuple[str, dict]:
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


def _error(error: Exception) -> dict[str, object]:
    return {"error": {"message": str(error), "type": type(error).__name__}}
