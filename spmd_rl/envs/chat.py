"""An episode of many turns in a model's chat template, token in, token out.

    chat = Chat(tokenizer=tokenizer, task=task, generate=generate, messages=[{"role": "user", "content": "Guess."}])
    reply = await chat.reply()  # the model's turn
    chat.add("tool", "higher")  # somebody else's, before the next reply

Before every turn the whole conversation is rendered as text; what follows the text of the tokens so far is encoded and
appended outside the loss.  Sampled ids stay as they came, the stop token among them, and are not written twice.
A template that renders earlier turns otherwise than they were sampled (drops thinking, trims, merges messages) is
detected by that text: the conversation then goes on in a new segment, a context of its own, or is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from spmd_rl.envs.environment import Generate, take_turn
from spmd_rl.model.tokenizer import Messages, Tokenizer
from spmd_rl.types import Completion, NotRetried, Rollout, Task

REWRITES = ("segment", "refuse")


class Rewritten(NotRetried):
    """The chat template writes the past otherwise than it was sampled, and that was to be refused."""


class Chat:
    """One conversation; `rollout` holds its tokens."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        task: Task,
        generate: Generate,
        messages: Messages,
        on_rewrite: str = "segment",  # "segment" | "refuse": when the template is not append-only
        variables: Mapping[str, object] | None = None,  # that the template sees: tools, enable_thinking, …
        rule: str = "",  # of the reward: special tokens written in it stay in the replies
    ) -> None:
        if on_rewrite not in REWRITES:
            raise ValueError(f"on_rewrite = {on_rewrite!r}: must be one of {', '.join(REWRITES)}")
        self.rollout = Rollout(env=task.env, task_id=task.task_id)
        self.messages = list(messages)
        self.variables: dict[str, Any] = dict(variables or {})
        self._tokenizer, self._generate = tokenizer, generate
        self._refuse, self._rule = on_rewrite == "refuse", rule
        self.completion: Completion | None = None  # the newest turn as it was sampled
        self._text = ""  # of the segment's tokens, less the last one if it is a stop token
        self._stop = ""  # the text of that stop token

    @property
    def truncated(self) -> bool:
        """The last turn ended at a token limit: there is no use in going on."""
        return self.rollout.finish_reason == "length"

    def add(self, role: str, content: str) -> None:
        """A message of somebody else; several may follow each other."""
        self.messages.append({"role": role, "content": content})

    async def reply(self, max_tokens: int | None = None, *, stop: Sequence[str] = ()) -> str:
        """Text of the model's next turn, without special tokens but those of the rule."""
        self._write_what_was_said()
        context = self.rollout.context
        completion = await take_turn(self.rollout, self._generate, max_tokens, stop=stop)
        self.completion = completion
        ids, stop_ids = completion.token_ids, self._tokenizer.stop_ids
        stopped = completion.finish_reason == "stop" and len(ids) > 0 and int(ids[-1]) in stop_ids
        said = ids[:-1] if stopped else ids
        self._stop = self._tokenizer.decode(ids[-1:], special=True) if stopped else ""
        content = self._tokenizer.decode(said, special=True, after=context)
        self._text += content
        self.messages.append({"role": "assistant", "content": content})
        return self._tokenizer.decode(said, rule=self._rule)

    def _write_what_was_said(self) -> None:
        """Bring the tokens up to the opening of the next reply."""
        whole = self._tokenizer.render_text(self.messages, **self.variables)
        kept = self._text + self._stop
        if not whole.startswith(kept):
            if self._refuse:
                raise Rewritten(_difference(whole, kept))
            self.rollout.new_segment()
            kept = ""
        self.rollout.append(self._tokenizer.encode(whole[len(kept) :], after=kept))
        self._text, self._stop = whole, ""


async def with_tool(
    chat: Chat,
    tool: Callable[[str], Awaitable[str | None]],  # what it answers to a reply; None: that calls no tool
    *,
    role: str,  # of the tool's messages
    max_calls: int,
) -> str:
    """Replies with the tool's answers between them; the text of the first one that calls no tool, or of the last."""
    for _ in range(max_calls):
        reply = await chat.reply()
        answer = None if chat.truncated else await tool(reply)
        if answer is None:
            return reply
        chat.add(role, answer)
    return await chat.reply()


def _difference(whole: str, kept: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(whole, kept, strict=False)) if a != b), min(len(whole), len(kept)))
    return (
        f"the chat template is not append-only: after {kept[max(0, at - 20) : at]!r} it renders "
        f"{whole[at : at + 40]!r} where {kept[at : at + 40]!r} was sampled; on_rewrite = 'segment' goes on anew"
    )
