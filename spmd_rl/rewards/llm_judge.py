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

from spmd_rl.rewards.text import fill, thought_out
from spmd_rl.types import NotRetried

_DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d{1,2}\s*(?:/|$))")
_VALUE = r"(?>\d+(?:\.\d+)?|\.\d+)"
_GRADE = re.compile(
    rf"\[\[\s*(?P<double>{_VALUE})(?:\s*/\s*(?P<double_of>{_VALUE}))?\s*\]\]"
    rf"|(?P<minus>(?<![\w)])-)?(?<![\w.])(?P<value>{_VALUE})(?!\w)"
    rf"(?P<range>\s*(?:-|\+|to\b|or\b|and\b)\s*\d+(?:\.\d+)?)?"
    r"(?:\s*(?:points?|marks?)?\s*\(?(?:/|out\s+of|of)(?:\s+a\s+(?:possible|total\s+of|maximum\s+of))?\s*"
    rf"(?P<of>{_VALUE})(?![\w/]))?(?P<percent>\s*%)?"
)
_AS_SHARE = re.compile(rf"\)?\s*(?:=|\(|or)\s*(?P<share>{_VALUE})(?P<percent>\s*%)?\)?")  # 7/10 = 70%
_WORD = (
    r"(?:scor(?:e|es|ed|ing)|grad(?:e|es|ed|ing)|rat(?:e|es|ed|ing)|marks?|points|verdict|evaluation|assessment|"
    r"judge?ment)"
)
_LINK = (
    r"[\"']?(?:\s+(?:for|of|to|given|awarded|i|would|will|give|the|this|that|it|my|reply|response|answer)){0,6}"
    r"\s*(?:\([^()\d]*\)|\[[^][\d]*\])?\s*(?:is|was|of|be|as|at|with|a|an|->|→|-|"
    r"(?:this|it|that|the)(?:\s+(?:reply|response|answer|output))?(?:\s+(?:is|as|at|with|a|an)){0,2})?"
    r"[\s\"'(\[{:=>~+]*(?:about|around|approximately)?\s*$"
)
_LABEL = re.compile(rf"(?<!\w){_WORD}{_LINK}", re.IGNORECASE)
_FINAL = re.compile(rf"(?<!\w)(?:final|overall|total)(?:\s+{_WORD}{_LINK}|\s*[:=]\s*$)", re.IGNORECASE)
_GIVEN = re.compile(  # before the only number of a text
    r"(?:(?:^[\s:]*|[.!?>\n])[\s\"'(\[{]*|(?<!\w)(?:give|giving|assign|award|say|deserves?|gets?|earns?|so|thus|therefore|hence|"
    r"it is|it's|this is)(?:\s+(?:it|this|that|the\s+(?:reply|response|answer)))?(?:\s+an?)?\s*)"
    r"(?:about|around|approximately|~)?\s*$",
    re.IGNORECASE,
)
_NO_COUNT = "points?|marks?|because|since|as|for|but|and|on|overall|in|due|with|given|based|though|although|not"
_COUNTS = re.compile(rf"[ \t]+(?!(?:{_NO_COUNT})\b)[a-z]")  # a word that says what the number before it counts
_ENDS = re.compile(r"[\s.!)\]}\"'>]*(?:</\w+>)?\s*$")
_AROUND = 80  # characters before a number that tell what it is
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

    After its thinking, the first of these that there is, all of them alike: numbers in [[double brackets]]; those
    called final, overall or total; those called a score, grade, rating, mark, verdict or the like, said to be out of
    the scale (7/10, 7 out of 10), or the end of the text and alone in their sentence; the only number, where it is
    given ("I give it a 7").  Two that differ, out of something else than `scale`, a range (7-8), a percentage or beyond
    the scale is no grade.
    """
    text = re.sub(r"[*_`$]", "", thought_out(text)).replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-")
    text = _DECIMAL_COMMA.sub(".", re.sub(r"\\boxed\s*\{([^{}]*)\}", r"\1", text)).strip()
    text = _without_scale(text, f"{scale:g}")
    found = [match for match in _GRADE.finditer(text) if not _is_enumerator(text, match)]
    if doubles := [match for match in found if match["double"]]:
        return _agreed(doubles, scale)
    found = _without_shares(text, found)
    found = [match for match in found if match["of"] or not _COUNTS.match(text, match.end())]
    before = [text[max(0, match.start() - _AROUND) : match.start()] for match in found]
    if finals := [match for match, said in zip(found, before, strict=True) if _FINAL.search(said)]:
        return _agreed(finals, scale)
    between = text[found[-2].end() : found[-1].start()].strip() if len(found) > 1 else ""
    if between == ":" and _ENDS.match(text, found[-1].end()):  # "7 of 10: 7.5" says it again, exactly
        return _agreed(found[-1:], scale)
    called = [match for match, said in zip(found, before, strict=True) if _LABEL.search(said)]
    out_of = [match for match in found if match["of"] and match not in called]
    last = (
        found[-1:]
        if found and _ENDS.match(text, found[-1].end()) and re.search(r"^[\s:]*$|[.!?\n]\s*$", before[-1])
        else []
    )
    if graded := [*called, *(match for match in out_of if float(match["of"]) == scale), *last]:
        return _agreed(graded, scale)
    if len(found) == 1 and not out_of and _GIVEN.search(before[0]):
        rest = text[found[0].end() :]
        alone = re.fullmatch(r"\s*(?:points?|marks?)?[\s.!)\]}\"'>]*(?:</\w+>)?\s*", rest)
        if alone or (before[0] and not re.match(r"\s*(?:out|of|/|percent|stars?|[.,:]?\d)", rest)):
            return _agreed(found, scale)
    return None


def _without_scale(text: str, best: str) -> str:
    """Without what only says what the scale is: "on a scale of 0 to 10", "(out of 10)" before the grade."""
    best = re.escape(best)
    text = re.sub(
        rf"(?i)[(\[]?\s*(?:\bon\s+)?(?:\ba\s+)?(?:\bscale\s*(?:is|of|from|:)?\s*)?(?<![\d./])[01]\s*(?:-|to|\.\.)\s*{best}"
        r"(?!\.?\d)(?:\s*scale)?\s*[)\]]?",
        " ",
        text,
    )
    return re.sub(rf"(?i)(?<=[a-z])\s*[(\[]?\s*(?<!\d )out\s+of\s+{best}(?!\.?\d)\s*[)\]]?\s*(?=[:=])", " ", text)


def _is_enumerator(text: str, match: re.Match[str]) -> bool:
    """Whether it numbers a line: "1. The reply …"."""
    line = text.rfind("\n", 0, match.start()) + 1
    return not text[line : match.start()].strip(" -(") and re.match(r"[.)] *\S", text[match.end() :]) is not None


def _without_shares(text: str, found: list[re.Match[str]]) -> list[re.Match[str]]:
    """Without numbers that say the one before them again, as a share: 7/10 (70%), 7/10 = 0.7."""
    kept: list[re.Match[str]] = []
    until = 0
    for match in found:
        if match.start() < until:
            continue
        kept.append(match)
        share = _AS_SHARE.match(text, match.end()) if match["of"] and float(match["of"]) else None
        if share is not None:
            said = float(share["share"]) / (100.0 if share["percent"] else 1.0)
            until = share.end() if abs(said - float(match["value"]) / float(match["of"])) < 1e-9 else 0
    return kept


def _agreed(found: list[re.Match[str]], scale: float) -> float | None:
    """The share that all of them say."""
    shares = {_share(match, scale) for match in found}
    return shares.pop() if len(shares) == 1 else None


def _share(match: re.Match[str], scale: float) -> float | None:
    value, best = float(match["double"] or match["value"]), float(match["double_of"] or match["of"] or scale)
    plain = not (match["percent"] or match["range"] or match["minus"])
    return value / scale if plain and best == scale and 0 <= value <= scale else None
