"""Multiple choice from a file: the letter that the reply ends with is judged.

The answer's column holds the letter or label of a choice, its text, or (as a number) its place from 0.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from spmd_rl.data import Dataset, Row
from spmd_rl.envs import Data
from spmd_rl.envs.prompts import Prompt, json_in, text_of
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.rewards import thought_out
from spmd_rl.tokenizer import Messages, Tokenizer
from spmd_rl.user_code import shown

_NAMED = r"(?:\b(?:answer|choice)(?:\s+(?:is|was|must be|should be|would be))?\s*[:=]?\s*(?:option|choice|letter)?|"
_NAMED += r"\b(?:option|choose|pick|select|go with)\s*:?)\s*"
_WRONG = r"(?:\s*(?:,|and|or|/)\s*[A-Z](?!\w))*\W*\s(?:is|are|was|were|can't|cannot)\s+(?:\w+\s+)?"
_WRONG += r"(?:wrong|incorrect|false|not|out)\b"
_RULED_OUT = r"(?i)\b(?:not|isn't|is not|rather than|instead of|than|unlike|exclude|eliminate|ruled? out|reject)\s+\W*$"
_ARC = {"text", "label"}


class Choice:
    """Rows with a question, a list of choices and the right one."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        path: str,  # a .jsonl or .parquet file, or a folder of them
        eval_path: str = "",
        holdout: int = 0,  # rows at the end that are evaluated instead of trained on
        max_epochs: int = 0,  # 0: no end
        question: str = "question",  # column: a text, or a list of messages
        choices: str = "choices",  # column, as `choices_of` reads it
        answer: str = "answer",  # column, as `right` reads it
        prompt: str = "{question}\n{choices}\nReply with the letter of the right answer.",
    ) -> None:
        self._prompt = Prompt(prompt, needed=("question", "choices"), column=question, hidden=[answer])
        self.tasks = Dataset(
            path=path,
            fields={"question": question, "choices": choices, "answer": answer},
            optional=self._prompt.columns,
            check=self._check,
            eval_path=eval_path,
            holdout=holdout,
            max_epochs=max_epochs,
        ).tasks
        self._choices, self._answer = choices, answer
        self.rollout = SingleTurn(tokenizer=tokenizer, prompt=self.prompt, reward=self.reward).rollout

    def prompt(self, data: Data) -> Messages:
        lines = [f"{letter}) {text}" for letter, text in zip(string.ascii_uppercase, data["choices"], strict=False)]
        return self._prompt.messages(data, choices="\n".join(lines))

    def reward(self, data: Data, reply: str) -> float:
        return float(chosen(reply, data["choices"]) == string.ascii_uppercase[data["answer"]])

    def _check(self, row: Row) -> Row:
        choices, labels = choices_of(row["choices"], self._choices)
        try:
            _refuse_two_readings(row["answer"], row["choices"])
            answer = string.ascii_uppercase.index(right(row["answer"], choices, labels))
        except ValueError as error:
            raise ValueError(f"column {self._answer!r}: {error}") from None
        return self._prompt.check(row) | {"choices": choices, "answer": answer}


def choices_of(value: object, column: str) -> tuple[list[str], list[str]]:
    """The texts of the choices and the labels that the row gives them, [] where it gives none.

    A list of texts or numbers; letters with texts {"A": "red", …}; {"text": […], "label": […]} as ARC has it, or a list
    of {"text": …, "label": …}; any of these as JSON in a string.
    """
    value = json_in(value, ("[", "{"))
    labels: list[object] = []
    if isinstance(value, Mapping) and value.keys() == _ARC:
        value, labels = value["text"], value["label"]
    elif isinstance(value, Mapping):
        value, labels = [value[key] for key in sorted(value)], sorted(value)
    elif isinstance(value, list) and value and all(isinstance(v, Mapping) and v.keys() == _ARC for v in value):
        value, labels = [v["text"] for v in value], [v["label"] for v in value]
    if not isinstance(value, list) or not isinstance(labels, list) or not 2 <= len(value) <= 26:
        raise ValueError(f"column {column!r} has {shown(value)}, wanted is a list of 2 to 26 choices")
    texts, names = [text_of(v, column).strip() for v in value], [text_of(v, column).strip() for v in labels]
    for several in (texts, names):
        if twice := [text for text in several if several.count(text) > 1]:
            raise ValueError(f"column {column!r} has {twice[0]!r} twice, wanted are choices that differ")
    if labels and len(labels) != len(texts):
        raise ValueError(f"column {column!r} has {len(texts)} choices and {len(labels)} labels")
    if any(name.isalpha() for name in names) and "".join(names) != string.ascii_uppercase[: len(names)]:
        raise ValueError(f"column {column!r} has the labels {names}, wanted are A, B, … in order, or numbers")
    return texts, names


def right(answer: object, choices: Sequence[str], labels: Sequence[str] = ()) -> str:
    """The letter of the right choice; ValueError where the row does not say it, or says two.

    A number counts from 0; a string is a label, where the row gives some, else a letter or the text of a choice.
    """
    letters = string.ascii_uppercase[: len(choices)]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return letters[answer]
    if isinstance(answer, str):
        text = answer.strip()
        if text in labels:
            return letters[list(labels).index(text)]
        found = {letters[list(choices).index(text)]} if text in choices else set()
        if not labels and len(letter := text.strip("().").upper()) == 1 and letter in letters:
            found.add(letter)
        if len(found) == 1:
            return found.pop()
        if found:
            raise ValueError(f"the answer {answer!r} is a letter, and the text of another one of {list(choices)}")
    names = list(labels) or f"{letters[0]} to {letters[-1]}, or 0 to {len(choices) - 1} as a number"
    raise ValueError(f"the answer {shown(answer)} is none of {list(choices)}, nor one of {names}")


def _refuse_two_readings(answer: object, choices: object) -> None:
    """Of a number among numbers: the place of a choice, and another choice."""
    numbers = [one for one in choices if isinstance(one, int | float)] if isinstance(choices, list) else []
    if isinstance(answer, int) and answer in numbers and choices[answer : answer + 1] != [answer]:
        raise ValueError(f"the answer {answer!r} is the place of a choice, and another one of {choices}")


def chosen(reply: str, choices: Sequence[str]) -> str | None:
    r"""The letter that a reply chooses; None where it names none, or leaves open which.

    The first of these that says something, after the reply's thinking: all of it is the text of one choice; \boxed{};
    a letter or the text of a choice after the last "answer is", "answer:", "option" or "choose"; the one letter that
    lines begin with and mark ("B) Vitamin C", "(B) A cell", "B because"); the last letter that stands alone and is not
    ruled out ("not A"); the one choice whose text stands in it.
    """
    text = re.sub(r"[*_`$]|\\(?:text|mathrm|mathbf)\s*(?=\{)", "", thought_out(reply)).strip()
    letters, texts = string.ascii_uppercase[: len(choices)], [_bare(choice) for choice in choices]
    for whole in (thought_out(reply).strip(), text):
        if choices.count(whole) == 1:
            return letters[choices.index(whole)]
    by_text = {bare: letter for letter, bare in zip(letters, texts, strict=True) if bare and texts.count(bare) == 1}
    for read in (_whole, _boxed, _named, _marked, _alone, _mentioned):
        if found := read(text, letters, by_text):
            return found.pop() if len(found) == 1 else None
    return None


NONE = {"none", "of them"}  # chooses something that is no choice


def _bare(text: str) -> str:
    """In small letters, blanks as one, without punctuation around it."""
    return " ".join(text.split()).strip(" .,;:!?\"'()[]").casefold()


def _letters(text: str, letters: str) -> list[tuple[re.Match[str], str]]:
    """Letters of choices that stand alone, in order.  Small ones count in brackets only, A before a word does not."""
    found = []
    for match in re.finditer(rf"(?<![\w'\-.\\])([{letters}{letters.lower()}])(?![\w'])", text):
        before, after = text[: match.start()][-1:], text[match.end() :]
        in_brackets = before in ("(", "[", "{", '"') or after[:1] == ")"
        is_word = match[1] in "AIai" and re.match(r"[ \t]+(?!because|since|as\b|or\b|and\b|is\b|if\b)[a-z]", after)
        if (match[1].isupper() or in_brackets) and not (is_word and not in_brackets):
            found.append((match, match[1].upper()))
    return found


def _with_alternatives(text: str, at: re.Match[str], letter: str, letters: str) -> set[str]:
    """The letter, and those that "or" joins to it."""
    others = re.match(rf"[)\]}}\"']*(?:\s*(?:,|/|or|and|,\s*or)\s*[(\[]*([{letters}])(?![\w']))+", text[at.end() :])
    return {letter, *(re.findall(rf"(?<!\w)[{letters}](?!\w)", others[0]) if others else ())}


def _whole(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    return {by_text[_bare(text)]} if _bare(text) in by_text else set()


def _boxed(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    contents = re.findall(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    if not contents:
        return set()
    content = contents[-1].strip("{} ")
    whole = _whole(content, letters, by_text) or _whole(f"({content})", letters, by_text)
    return whole or {letter for _, letter in _letters(f"({content})", letters)[:1]} or NONE


def _named(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    for match in reversed([*re.finditer(_NAMED, text, re.IGNORECASE)]):
        rest = text[match.end() :]
        if letter := re.match(rf"[\s(\[\"']*([{letters}{letters.lower()}])(?![\w'])", rest):
            word = re.match(r"[ \t]+(?!because|since|as\b|or\b|and\b|is\b)[a-z]", rest[letter.end() :])
            bracketed = "(" in letter[0] or rest[letter.end() :][:1] in ")]"
            if not (word and letter[1] in "AIai" and not bracketed):
                return _with_alternatives(rest, letter, letter[1].upper(), letters)
        line = _bare(rest.lstrip().split("\n")[0])
        fits = {by_text[bare] for bare in by_text if re.match(rf"(?:the )?{re.escape(bare)}(?!\w)", line)}
        if fits:
            return {max(fits, key=lambda letter: len(next(b for b, x in by_text.items() if x == letter)))}
    return set()


def _marked(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    lines = re.findall(rf"(?m:^)[ \t>\-(\[]*([{letters}{letters.lower()}])[ \t]*(?:[)\].:]|$|because|since)", text)
    found = {letter.upper() for letter in lines}
    return found if len(found) == 1 else set()  # else it lists the choices


def _alone(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    """A letter within the text of a choice does not stand alone: C in "it is vitamin C"."""
    named = [bare for bare in by_text if len(bare) > 1]
    inside = [match.span() for bare in named for match in re.finditer(re.escape(bare), text, re.IGNORECASE)]
    found = [
        (m, letter)
        for m, letter in _letters(text, letters)
        if not any(first <= m.start() < last for first, last in inside)
    ]
    ruled_out = [re.search(_RULED_OUT, text[: m.start()]) or re.match(_WRONG, text[m.end() :]) for m, _ in found]
    kept = [one for one, out in zip(found, ruled_out, strict=True) if not out]
    if not kept:
        return set()
    _, letter = kept[-1]
    joined = [_with_alternatives(text, m, x, letters) for m, x in kept]
    return next((j for j in reversed(joined) if letter in j and len(j) > 1), {letter})


def _mentioned(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    bare = _bare(text)
    found = {choice for choice in by_text if choice and re.search(rf"(?<!\w){re.escape(choice)}(?!\w)", bare)}
    return {by_text[choice] for choice in found if not any(choice != other and choice in other for other in found)}
