"""As much of the package `verifiers` 0.1 as an environment with a tool needs; one that plays "guess the word"."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import time

from verifiers.clients import ask


def load_environment(name, **settings):
    return importlib.import_module(name).load_environment(**settings)


class Words:
    """The model may look a word up by a tool; the reward is for saying it, and a metric counts the calls."""

    def __init__(self, num=6, own_eval=False, hang=False, by_group=False, leave=None, killed=False):
        self.requires_group_rollouts = by_group
        self.rows = [{"example_id": i, "prompt": f"word {i}?", "answer": f"w{i}"} for i in range(num)]
        self.own_eval, self.hang, self.killed = own_eval, hang, killed
        if leave is not None:
            sys.exit(leave)

    def get_dataset(self):
        print("to stdout, as packages do")
        return self.until_killed() if self.killed else self.rows

    def until_killed(self):
        yield from self.rows
        os.kill(os.getpid(), signal.SIGKILL)

    def build_eval_dataset(self):
        return [{"example_id": 99, "prompt": "word 99?", "answer": "w99"}] if self.own_eval else None

    async def run_rollout(self, row, client, model, sampling_args):
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        messages, calls = [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}]}], 0
        while self.hang:
            time.sleep(3600)
        message = ask(client, messages, tools=tools, stream=True)
        while message.get("tool_calls"):
            calls += 1
            (call,) = message["tool_calls"]
            number = json.loads(call["function"]["arguments"])["number"]
            reply = {"role": "tool", "tool_call_id": call["id"], "content": f"w{number}"}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, reply]
            message = ask(client, messages, tools=tools, stream=False)
        if not message["content"]:
            said = {"error": "EmptyModelResponseError", "error_chain_str": "EmptyModelResponseError"}
        else:
            said = {"error": "Mine", "error_chain_str": "Mine -> broken"} if message["content"] == "!" else None
        if message["content"] == "?":
            logging.getLogger("verifiers.rubrics.rubric.Rubric").error("Error calling reward function right: oh")
        right = float(message["content"] == row["answer"])
        return {"reward": 0.5 * right, "metrics": {"right": right, "calls": calls}, "error": said}
