"""A language model as the judge of replies, over HTTP: any server with OpenAI's chat completions.

    judge = Judge(url="http://host:8000/v1", model="qwen3-32b", prompt="Grade 0-10: {question} {reply}")
    score = await judge(reply, question="…")  # 0.0 … 1.0

The score is the last number of what the judge says, divided by `scale`.  Too many requests, server errors, lost
connections and answers without a number are tried again, with growing pauses; then the call raises, so that the sample
is dropped and counted: a judge that is away is not a reward of 0.  Knows nothing of rollouts.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from spmd_rl.rewards import numbers
from spmd_rl.types import NotRetried

PAUSE_S = 0.5  # before the first further attempt, doubled for each one after it
AGAIN = (408, 409, 425, 429)  # and every 5xx


class JudgeFailed(NotRetried):
    """No score after all attempts."""


class Judge:
    """At most `max_concurrent` requests at a time; further ones wait."""

    def __init__(
        self,
        *,
        url: str,  # up to /v1
        model: str,  # as the server knows it
        prompt: str,  # with {reply}, and the names that are passed to a call
        scale: float = 10.0,  # the best grade
        max_concurrent: int = 8,
        retries: int = 3,
        timeout_s: float = 60.0,  # of one attempt
        key_variable: str = "OPENAI_API_KEY",  # environment variable of the key, if the server wants one
        pause_s: float = PAUSE_S,
    ) -> None:
        if "{reply}" not in prompt:
            raise ValueError("judge: the prompt does not contain {reply}")
        self._url, self._model, self._prompt = url.rstrip("/") + "/chat/completions", model, prompt
        self._scale, self._retries, self._timeout_s, self._pause_s = scale, retries, timeout_s, pause_s
        self._key_variable, self._max_concurrent = key_variable, max_concurrent
        self._threads: ThreadPoolExecutor | None = None  # started when first needed

    async def __call__(self, reply: str, **values: object) -> float:
        """The score.  Waits for the server."""
        content = self._prompt.format(reply=reply, **values)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._max_concurrent, thread_name_prefix="judge")
        loop, problem = asyncio.get_running_loop(), ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(self._pause_s * 2 ** (attempt - 1))
            try:
                answer = await loop.run_in_executor(self._threads, self._ask, content)
                grades = numbers(answer)
                if grades and 0 <= grades[-1] <= self._scale:
                    return float(grades[-1]) / self._scale
                problem = f"no grade from 0 to {self._scale:g} in {answer[-80:]!r}"
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}"
                error.close()
                if error.code < 500 and error.code not in AGAIN:
                    break
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise JudgeFailed(f"{self._url}: {problem}")

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def _ask(self, content: str) -> str:
        """In a thread: one request."""
        body = {"model": self._model, "messages": [{"role": "user", "content": content}], "temperature": 0}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._key_variable):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
            return json.load(response)["choices"][0]["message"]["content"]
