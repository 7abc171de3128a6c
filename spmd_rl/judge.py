"""A language model as the judge of replies, over HTTP: any server with OpenAI's chat completions.

    judge = Judge(url="http://host:8000/v1", model="qwen3-32b", prompt="Grade 0-10: {question} {reply}")
    score = await judge(reply, question="…")  # 0.0 … 1.0

The score is the grade that the judge says (`grade`), divided by `scale`.  Too many requests, server errors, lost
connections and answers without a grade are tried again, with growing pauses; then the call raises, so that the sample
is dropped and counted: a judge that is away is not a reward of 0.  Knows nothing of rollouts.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from spmd_rl.rewards import fill, thought_out
from spmd_rl.types import NotRetried

_DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d{1,2}\s*(?:/|$))")
_GRADE = re.compile(
    r"\[\[\s*(?P<double>\d+(?:\.\d+)?)\s*\]\]"
    r"|(?P<minus>(?<![\w)])-)?(?<![\w.])(?P<value>(?>\d+(?:\.\d+)?|\.\d+))(?!\w)"
    r"(?P<range>\s*(?:-|\N{EN DASH}|to)\s*\d+(?:\.\d+)?)?"
    r"(?:\s*(?:/|out\s+of|of)\s*(?P<of>\d+(?:\.\d+)?))?(?P<percent>\s*%)?"
)
_LABEL = re.compile(
    r"(?:score|grade|rating|mark|verdict|evaluation)s?[\"']?\s*(?:is|of|:|=|would be|\()?\s*[\"'(\[]*\s*$",
    re.IGNORECASE,
)
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
        fill(prompt, {}, needed=("reply",))
        self._url, self._model, self._prompt = url.rstrip("/") + "/chat/completions", model, prompt
        self._scale, self._retries, self._timeout_s, self._pause_s = scale, retries, timeout_s, pause_s
        self._key_variable, self._max_concurrent = key_variable, max_concurrent
        self._threads: ThreadPoolExecutor | None = None  # started when first needed

    async def __call__(self, reply: str, **values: object) -> float:
        """The score.  Waits for the server."""
        content = fill(self._prompt, {"reply": reply, **values})
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._max_concurrent, thread_name_prefix="judge")
        loop, problem = asyncio.get_running_loop(), ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(self._pause_s * 2 ** (attempt - 1))
            try:
                answer = await loop.run_in_executor(self._threads, self._ask, content)
                score = grade(answer, self._scale)
                if score is not None:
                    return score
                problem = f"no grade from 0 to {self._scale:g} in {answer[-200:]!r}"
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
            content = json.load(response)["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise TypeError(f"the judge's content is {content!r}")
        return content


def grade(text: str, scale: float) -> float | None:
    """The share of the best grade that a judge gives in its own words; None where that cannot be read for certain.

    After its thinking, the first of these that there is: a number in [[double brackets]]; the number that all of it
    ends with; the last one that is said to be out of something (7/10, 7 out of 10) or called a score, grade, rating,
    mark or verdict; the only number.  Out of something else than `scale`, a range (7-8) or beyond it is no grade.
    """
    text = _DECIMAL_COMMA.sub(".", re.sub(r"[*_`]", "", thought_out(text))).strip()
    found = [(match, _is_labelled(text, match)) for match in _GRADE.finditer(text)]
    if bracketed := [match for match, _ in found if match["double"]]:
        chosen = bracketed[-1]
    elif found and not text[found[-1][0].end() :].strip(" .!)]}\"'\n"):
        chosen = found[-1][0]
    elif labelled := [match for match, is_labelled in found if is_labelled or match["of"]]:
        chosen = labelled[-1]
    elif len(found) == 1:
        chosen = found[0][0]
    else:
        return None
    value, best = float(chosen["double"] or chosen["value"]), float(chosen["of"] or scale)
    plain = not (chosen["percent"] or chosen["range"] or chosen["minus"])
    return value / scale if plain and best == scale and 0 <= value <= scale else None


def _is_labelled(text: str, match: re.Match[str]) -> bool:
    return _LABEL.search(text, 0, match.start()) is not None
