"""Text to token ids and back, as `transformers.AutoTokenizer` does for a model's Hugging Face folder.

Special tokens come from tokenizer.json, tokenizer_config.json or special_tokens_map.json, whichever names them; a
truncation or padding that tokenizer.json carries is off.  No code of the folder is run.  transformers (and torch with
it) is imported when a tokenizer is built, so that environments can be imported without.  Knows nothing of models,
rollouts or sampling.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

Messages = Sequence[Mapping[str, Any]]  # {"role": "user", "content": "What is 3 + 8?"}, …
CONTEXT = 64  # characters before a continuation that may change how its beginning is split
CONTEXT_TOKENS = 4  # the same for the text of tokens
TRIAL_S = 30.0  # that reading TRIAL may take, which takes some hundredths of a second
TRIAL = tuple(4096 // len(part) * part for part in ("a", " ", "\n", "7", "-", "aA 1!\n", "é 語", "x=1\t"))
BREAKS = ("\n", "a")  # stand for them where the last token would reach into the continuation


class Tokenizer:
    """The tokenizer of one folder."""

    def __init__(self, folder: str | Path, variables: Mapping[str, object] | None = None) -> None:
        """Read the folder.  `variables` are seen by the chat template in every conversation (enable_thinking, …).

        Raises ValueError where the folder has no tokenizer that can be used.
        """
        from transformers import AutoTokenizer

        self._variables = dict(variables or {})
        folder = Path(folder)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever it is, the folder is to blame
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            missing = "" if (folder / "tokenizer.json").is_file() else "tokenizer.json is missing; "
            raise ValueError(
                f"{folder}: {missing}AutoTokenizer.from_pretrained({str(folder)!r}) fails with {reason[:300]}; "
                "save_pretrained(DIR) of a working one writes the files"
            ) from error
        names = type(self._tokenizer).vocab_files_names.values()
        if not any((folder / name).is_file() for name in names):  # some classes are then made of special tokens alone
            raise ValueError(
                f"{folder}: has no vocabulary, none of {', '.join(sorted(names))}: save_pretrained(DIR) of a working "
                "tokenizer writes the files"
            )
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"{folder}: {type(self._tokenizer).__name__} has no fast form: write a tokenizer.json of it"
            )
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()
        added = self._tokenizer.added_tokens_decoder
        self._special = dict(zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True))
        self._special |= {token_id: token.content for token_id, token in added.items() if token.special}
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.eos_id: int | None = self._tokenizer.eos_token_id
        self.pad_id: int | None = self._tokenizer.pad_token_id  # often eos_id: masks come from lengths, not from it
        generation = _read_json(folder / "generation_config.json")
        try:
            self.stop_ids = self._stop_ids(generation, added)
        except Exception as error:  # whatever a template raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"{folder}: its chat template cannot be used: {reason[:300]}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return len(self._tokenizer)

    def encode(self, text: str, *, after: str = "") -> np.ndarray:
        """[N] int32; special tokens written out in the text become themselves, none is added.

        With `after`, the tokens of `text` where it follows that text: some tokenizers mark the beginning of a text, and
        only that (`▁` of SentencePiece).
        """
        for before in (after[-CONTEXT:], *BREAKS) if after and text else ():
            whole = self._tokenizer(before + text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            spans, size = whole["offset_mapping"], len(before)
            if not any(start < size < end for start, end in spans):  # else one token holds the end and the beginning
                return np.array(
                    [i for i, (_, end) in zip(whole["input_ids"], spans, strict=True) if end > size], np.int32
                )
        return np.array(self._tokenizer.encode(text, add_special_tokens=False, verbose=False), np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, no special token added; other threads go on meanwhile."""
        ids = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        assert isinstance(ids, list)
        return ids

    def decode(
        self,
        token_ids: Sequence[int] | np.ndarray,
        *,
        special: bool = False,
        rule: str = "",
        after: Sequence[int] | np.ndarray = (),
    ) -> str:
        """Text of the tokens.  Special ones are left out unless `special`, or unless `rule` writes them out.

        Example: with rule = "<answer>.*</answer>" a special token <answer> stays.  With `after`, the text as it follows
        the text of those tokens: some tokenizers take off a blank at the beginning of a text, and only there.
        """
        ids = [int(i) for i in token_ids]
        if len(after):
            before = [int(i) for i in after[-CONTEXT_TOKENS:]]
            whole, start = self.decode(before + ids, special=special), self.decode(before, special=special)
            if whole.startswith(start):
                return whole[len(start) :]
        if not special and rule:
            hidden = {token_id for token_id, text in self._special.items() if text not in rule}
            ids, special = [i for i in ids if i not in hidden], True
        text = self._tokenizer.decode(ids, skip_special_tokens=not special)
        assert isinstance(text, str)  # of one list of ids
        return text

    def render(self, messages: Messages, *, open_reply: bool = True, **variables: Any) -> np.ndarray:
        """[N] int32, a conversation in the model's chat template.

        `open_reply` ends it with the opening of the assistant's next turn; `variables` (tools, …) are seen by the
        template beside those of all conversations.
        """
        return self.encode(self.render_text(messages, open_reply=open_reply, **variables))

    def render_text(self, messages: Messages, *, open_reply: bool = True, **variables: Any) -> str:
        """Text that `render` encodes."""
        if self._tokenizer.chat_template is None:
            raise ValueError("this model's folder has no chat template: build its prompts with encode()")
        seen: dict[str, Any] = {**self._variables, **variables}  # of whatever type the template takes
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=open_reply, **seen
        )
        assert isinstance(text, str)  # of one conversation
        return text

    def _stop_ids(self, generation: Mapping[str, object], added: Collection[int]) -> tuple[int, ...]:
        """Of the generation config, the tokenizer's EOS, and the added token that the template ends a reply with."""
        ids = generation.get("eos_token_id")
        stops = set(ids if isinstance(ids, list) else [ids]) | {self.eos_id}
        if self._tokenizer.chat_template is not None:
            chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
            after = self.encode(self.render_text(chat, open_reply=False).rpartition("answer")[2], after="answer")
            if len(after) and int(after[0]) in added:
                stops.add(int(after[0]))
        return tuple(sorted(stop for stop in stops if stop is not None))


def try_tokenizer(
    folder: str | Path, variables: Mapping[str, object] | None = None, *, limit_s: float = TRIAL_S
) -> Tokenizer:
    """The tokenizer of a folder that nobody has read yet: a pattern or a template may take for ever.

    Loads it, renders a conversation and encodes TRIAL.  ValueError where that fails, or takes longer than `limit_s`:
    the thread that does it is left alone then, and ends with the process.
    """
    import transformers  # noqa: F401 (its own import takes seconds, which are not the folder's)

    made: Future[Tokenizer] = Future()

    def read() -> None:
        try:
            tokenizer = Tokenizer(folder, variables)
            tokenizer.encode_all(TRIAL)
        except ValueError as error:
            made.set_exception(error)
        except BaseException as error:  # a pattern that gives up panics, which is no Exception
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            made.set_exception(ValueError(f"{folder}: its tokenizer fails with {reason[:300]}"))
        else:
            made.set_result(tokenizer)

    threading.Thread(target=read, name="first reading of a tokenizer", daemon=True).start()
    try:
        return made.result(limit_s)
    except TimeoutError:
        raise ValueError(
            f"{folder}: its tokenizer and chat template have not read a conversation and {sum(map(len, TRIAL)):,} "
            f"characters within {limit_s:g} s: look for a pattern in tokenizer.json, or a loop in the template, that "
            "does not end"
        ) from None


def _read_json(path: Path) -> dict[str, object]:
    """Empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    if not isinstance(words, dict):
        raise ValueError(f"{path}: holds no JSON object but {str(words)[:60]}")
    return words
