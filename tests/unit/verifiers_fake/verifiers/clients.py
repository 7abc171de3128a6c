"""A client of chat completions, plain and streamed."""

from __future__ import annotations

import json
import urllib.request


class Client:
    def __init__(self, url):
        self.url = url

    async def close(self):
        pass


def resolve_client(config):
    return Client(config.api_base_url)


def ask(client, messages, **body):
    """The message of the reply, put together from its parts where it is streamed."""
    data = json.dumps({"model": "m", "messages": messages, **body}).encode()
    with urllib.request.urlopen(client.url + "/chat/completions", data, timeout=20.0) as response:
        if not body["stream"]:
            return json.load(response)["choices"][0]["message"]
        *parts, done, last = response.read().decode().split("\n\n")
    assert (done, last) == ("data: [DONE]", "")
    message, reasons = {"content": "", "tool_calls": []}, []
    for part in parts:
        for choice in json.loads(part.removeprefix("data: "))["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            message["tool_calls"] += choice["delta"].get("tool_calls", [])
            reasons.append(choice["finish_reason"])
    assert reasons == [None, "tool_calls" if message["tool_calls"] else "stop"]
    return message
