"""Text to token ids and back, as a model's Hugging Face folder says.

Given a folder with tokenizer.json and tokenizer_config.json; a chat template and generation_config.json where there
are any.  Reads them with `tokenizers` and `jinja2` alone: transformers' AutoTokenizer gives the same ids but imports
torch, which the orchestrator does without (2 s against 0.1 s).  Knows nothing of models, rollouts or sampling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import tokenizers
from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, object]]  # {"role": "user", "content": "What is 3 + 8?"}, …


class Tokenizer:
    """The tokenizer of one folder."""

    def __init__(self, folder: Path, variables: Mapping[str, object] | None = None) -> None:
        """`variables` are seen by the chat template in every conversation (enable_thinking, …)."""
        self._variables = dict(variables or {})
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{path} is missing; AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes it"
            )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        settings = _read_json(path.with_name("tokenizer_config.json"))
        special = {key: _text(value) for key, value in settings.items() if key.endswith("_token") and value}
        self._special = {key: text for key, text in special.items() if text is not None}
        self._template = _compile(_template_text(path.parent, settings))
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        self.pad_id = self._id("pad_token")  # often eos_id: masks come from lengths, never from the pad id
        self.stop_ids = self._stop_ids(_read_json(path.with_name("generation_config.json")))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """[N] int32; special tokens written out in the text become themselves, none is added."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, special: bool = False) -> str:
        """The text of the tokens, with the special ones left out unless `special`."""
        return self._tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=not special)

    def render(self, messages: Messages, *, open_reply: bool = True, **variables: object) -> np.ndarray:
        """[N] int32, a conversation in the model's chat template.

        `open_reply` ends it with the opening of the assistant's next turn; `variables` (tools, …) are seen by the
        template beside those of all conversations.
        """
        return self.encode(self.render_text(messages, open_reply=open_reply, **variables))

    def render_text(self, messages: Messages, *, open_reply: bool = True, **variables: object) -> str:
        """What `render` encodes."""
        if self._template is None:
            raise ValueError("this model's folder has no chat template: build its prompts with encode()")
        known = {"tools": None, "documents": None, **self._special, **self._variables, **variables}
        return self._template.render(messages=list(messages), add_generation_prompt=open_reply, **known)

    def _id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(self._special[name]) if name in self._special else None

    def _stop_ids(self, generation: Mapping[str, object]) -> tuple[int, ...]:
        """Of the generation config, the tokenizer's EOS, and the special token that the template ends a reply with."""
        ids = generation.get("eos_token_id")
        stops = set(ids if isinstance(ids, list) else [ids]) | {self.eos_id}
        if self._template is not None:
            chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
            after = self.encode(self.render_text(chat, open_reply=False).rpartition("answer")[2])
            added = self._tokenizer.get_added_tokens_decoder()
            if len(after) and int(after[0]) in added:
                stops.add(int(after[0]))
        return tuple(sorted(stops - {None}))


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks the assistant's part in some templates; its body is kept."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(text: str | None) -> Template | None:
    """A chat template in the environment that such templates are written for."""
    if text is None:
        return None
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], cache_size=0
    )
    jinja.filters["tojson"] = _to_json
    jinja.globals["raise_exception"] = _raise
    jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return jinja.from_string(text)


def _to_json(value: object, ensure_ascii: bool = False, **options: object) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja's own escapes < and > for HTML


def _raise(message: str) -> None:
    raise TemplateError(message)


def _template_text(folder: Path, settings: Mapping[str, object]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    text = settings.get("chat_template")
    if isinstance(text, list):  # several by name
        text = {entry["name"]: entry["template"] for entry in text}.get("default")
    return text


def _text(token: object) -> str | None:
    """A special token is written as its text or as a table with its text."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, object]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
