"""Episodes by programs that speak OpenAI's chat completions: they get a URL, their tokens are recorded.

    [env.mine]
    path = "spmd_rl.envs.endpoint:Endpoint"
    args = { program = "my_pkg:play", tasks = "my_pkg:tasks" }

`async def play(base_url, data)` talks to `base_url` + "/chat/completions" as often as it likes, by any client, and
returns the reward or its parts; `tasks(seed, split)` are those of an environment.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator

from spmd_rl.envs.chat_server import ChatServer
from spmd_rl.envs.environment import Generate, judged
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import Rollout, Task


class Endpoint:
    """The program runs on the event loop of its rank."""

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
        self._server = ChatServer(tokenizer=tokenizer, on_rewrite=on_rewrite)
        self.close = self._server.close

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        tasks: Iterator[Task] = self._tasks(seed, split)
        return tasks

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        rollout, reward = await self._server.episode(task, generate, lambda url: self._program(url, task.data))
        return judged(rollout, reward, function=self._program)
