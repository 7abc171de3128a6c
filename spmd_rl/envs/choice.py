"""Multiple choice from a file: the letter that the reply ends with is judged.

The answer's column holds the letter or label of a choice, its text, or (as a number) its place from 0.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_rl.diagnostics.user_code import shown
from spmd_rl.envs.dataset import Dataset
from spmd_rl.envs.environment import Data
from spmd_rl.envs.prompts import Prompt, json_in, text_of
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.files.row_files import Row
from spmd_rl.model.tokenizer import Messages, Tokenizer
from spmd_rl.rewards.text import thought_out

_ARC = {"text", "label"}
_WORD = r"0-9A-Za-z_\u00c0-\u024f"  # beside one of these a letter does not stand alone
_NAMED = re.compile(
    r"(?:\b(?:answers?|choice|antwort|réponse|respuesta)(?:\s+(?:is|are|was|must be|should be|would be|ist|est|es))?"
    r"\s*(?:[:=：]|-(?=\s))?\s*(?:the\s+)?(?:option|choice|letter)?|"
    r"\b(?:option|letter|choose|pick|select|go(?:ing)? with)\s*:?|答案[是为：:]*|[选選])\s*",
    re.IGNORECASE,
)
_WRONG = re.compile(
    r"(?:\s*(?:,|and|or|/)\s*[A-Z](?!\w))*\W*\s(?:(?:is|are|was|were|being|isn't|aren't|can't|cannot)\s+(?:\w+\s+)?"
    r"(?:wrong|incorrect|false|not|out|right|correct)\b|(?:is|are)(?:n't|\s+not)\b|can(?:'t|not)\b)"
)
_RIGHT = re.compile(r"[)\]]?\s+(?:is|must be|should be)\s+(?:the\s+)?(?:right|correct|best|true|answer)\b")
_RULED_OUT = re.compile(
    r"(?i)\b(?:not|isn't|neither|nor|can't be|cannot be|rather than|instead of|than|unlike|exclude|eliminate|"
    r"ruled? out|reject)\s+\W*(?:(?:the|options?|choices?|both|and|or|nor|[a-z])\b\W*)*$"
)
_CORRECTED = (
    r"(?i:\b(?:no|wait|actually|rather|correction|sorry)\b)[^\w\n]*(?i:(?:it|that|the answer)(?:'s| is| must be)\s+)?"
)
_REASON = re.compile(r"(?i)\b(?:because|since|as|whereas|while|unlike|being)\b")
_THEREFORE = r"is|it's|be|so|thus|therefore|hence|choose|pick|select|believe|leaves|leaves us with|say|sure|no|but|"
_THEREFORE += r"actually|then|letter"
_BEFORE = re.compile(  # a letter that stands alone: what may stand before it
    rf"(?i)(?:^|[^\w\s'-]|\n|(?<!\w)(?:{_THEREFORE}|said|says?|think|guess|thought|with|for|option|choice|answer|not|doubt|"
    r"definitely|probably|likely|clearly|certainly|rather|and|or|nor|either|both|neither|eliminate|exclude|than|of|to))"
    r"\s*[(\[{\"']*$"
)
_DECIDED = re.compile(rf"(?i)(?<!\w)(?:{_THEREFORE}|wait)[\s,:(\[\"'.]*$")
_ENDS_HERE = rf"(?![{_WORD}'+]|-[A-Za-z]|\.[A-Za-z])"
_AROUND = 60  # characters before a letter that tell what it is


class Choice:
    """Rows with a question, a list of choices and the right one."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        path: str,  # a file of rows (.jsonl, .json, .csv, .parquet, …), or a folder of them
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


def choices_of(written: object, column: str) -> tuple[list[str], list[str]]:
    """The texts of the choices and the labels that the row gives them, [] where it gives none.

    A list of texts or numbers; letters with texts {"A": "red", …}; {"text": […], "label": […]} as ARC has it, or a list
    of {"text": …, "label": …}; any of these as JSON in a string.
    """
    value: Any = json_in(written, ("[", "{"))  # looked at below
    labels: Any = []
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

    A number counts from 0, unless the row has numbers for labels; a string is a label, where the row gives some, else a
    letter or the text of a choice.
    """
    letters = string.ascii_uppercase[: len(choices)]
    if isinstance(answer, int) and not isinstance(answer, bool):
        if any(label.isdecimal() for label in labels):
            answer = str(answer)
        elif 0 <= answer < len(choices):
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
    if not isinstance(choices, list):
        return
    numbers = [one for one in choices if isinstance(one, int | float)]
    if isinstance(answer, int) and answer in numbers and choices[answer : answer + 1] != [answer]:
        raise ValueError(f"the answer {answer!r} is the place of a choice, and another one of {choices}")


def chosen(reply: str, choices: Sequence[str]) -> str | None:
    r"""The letter that a reply chooses; None where it names none, or leaves open which.

    The first of these that says something, after the reply's thinking: all of it is a letter or the text of one
    choice; \boxed{}; a letter or the text of a choice after the last "answer is", "answer:", "option" or "choose",
    unless "no, B" comes after it; the one letter that lines begin with and mark ("B) Vitamin C", "(B) A cell", "B
    because"); letters that stand alone, lists of the choices, reasons and what is ruled out ("not A") aside: the only
    one, the one that is "right", or the last after "so", "it is" and the like; the one choice whose text stands in it.
    """
    text = re.sub(r"</?answer>", lambda tag: "\n" if "/" in tag[0] else "\nAnswer: ", thought_out(reply))
    text = re.sub(r"""(?<!\w)['"“‘](\w)['"”’](?!\w)""", r"(\1)", re.sub("</?[a-z]{1,6}>", " ", text))
    text = re.sub(r"[*_`$]|\\(?:text|mathrm|mathbf|textbf)\s*(?=\{)", "", text).translate(_WIDE).strip()
    letters = LETTERS[: len(choices)]
    for whole in (thought_out(reply).strip(), text):
        if choices.count(whole) == 1 and whole.upper() not in letters:
            return letters[choices.index(whole)]
    texts = [_bare(re.sub(r"[*_`$]", "", choice)) for choice in choices]
    by_text = {
        text: letter
        for text, letter in zip(texts, letters, strict=True)
        if text and texts.count(text) == 1 and text.upper() not in letters
    }
    for read in (_whole, _boxed, _named, _marked, _alone, _mentioned):
        if found := read(text, letters, by_text):
            return found.pop() if len(found) == 1 and found <= set(letters) else None
    return None


LETTERS = string.ascii_uppercase
NONE = {"none"}  # chooses something that is no choice
_WIDE = {ord(c) + 0xFEE0: c for c in string.ascii_letters + "().:,"} | {ord("\u2019"): "'"}


def _bare(text: str) -> str:
    """In small letters, blanks as one, without punctuation around it."""
    return " ".join(text.split()).strip(" .,;:!?\"'()[]{}").casefold()


def _letters(text: str, letters: str) -> list[re.Match[str]]:
    """Letters of choices that stand alone, in order.  Small ones count in brackets only, A before a word does not."""
    found = []
    for match in re.finditer(rf"(?<![{_WORD}'\-.\\])([{letters}{letters.lower()}]){_ENDS_HERE}(?!->)", text):
        before, after = text[: match.start()][-1:], text[match.end() : match.end() + 20]
        in_brackets = before in ("(", "[", "{", '"', "'") or after[:1] == ")"
        is_word = match[1] in "AIai" and re.match(
            r"[ \t]+(?!because|since|as\b|or\b|and\b|nor\b|is\b|if\b|being\b)[a-z]", after
        )
        if (match[1].isupper() or in_brackets) and not (is_word and not in_brackets):
            found.append(match)
    return found


def _with_alternatives(text: str, at: re.Match[str], letters: str) -> set[str]:
    """The letter, and those that "or" joins to it."""
    one = rf"[(\[]*[{letters}](?![{_WORD}'])[)\]]?"
    more = r"\s*(?:[,;/&+|]|(?:,\s*)?\bor(?:\s+(?:maybe|perhaps|possibly|even))?|(?:,\s*)?\band)\s*"
    joined = rf"[)\]}}\"']*(?:{more}{one}|[ \t]*{one}(?![ \t]+[a-z]))+"
    after = text[at.end() : at.end() + 4 * _AROUND]
    others = re.match(joined, after)
    if not others or _WRONG.match(after[others.end() :]):
        return {at[1].upper()}
    return {at[1].upper(), *re.findall(rf"(?<![{_WORD}])[{letters}](?![{_WORD}])", others[0])}


def _whole(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    bare = _bare(text)
    return (
        {by_text[bare]} if bare in by_text else {bare.upper()} if len(bare) == 1 and bare.upper() in letters else set()
    )


def _boxed(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    contents = re.findall(r"\\f?boxe?d?\s*\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    if not contents:
        return set()
    content = re.sub(r"[{}]", "", contents[-1]).strip()
    whole = _whole(content, letters, by_text)
    found = _letters(f"({content})", letters)
    return whole or (_with_alternatives(f"({content})", found[0], letters) if found else NONE)


def _named(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    for match in reversed([*_NAMED.finditer(text)]):
        if _RULED_OUT.search(text[max(0, match.start() - _AROUND) : match.start()]):
            continue
        rest = text[match.end() : match.end() + 20 * _AROUND]
        letter = re.match(rf"[\s(\[\"']*([A-Za-z]){_ENDS_HERE}", rest)
        if letter and (letter[1].upper() in letters or letter[1].isupper()):
            after = rest[letter.end() :]
            word = re.match(r"[ \t]+(?!because|since|as\b|or\b|and\b|is\b)[a-z]", after)
            bracketed = "(" in letter[0] or after[:1] in tuple(")]")
            if not (word and letter[1] in "AIai" and not bracketed) and not _WRONG.match(after):
                if letter[1].upper() not in letters:
                    return NONE
                corrected = re.findall(rf"{_CORRECTED}\(?([{letters}])(?=\W*$|[.,!)])", after)
                return {corrected[-1]} if corrected else _with_alternatives(rest, letter, letters)
        if begins := _begins(rest, by_text):
            beside = re.match(r"[^\n()]*\(([A-Z])\)", rest)
            joined = re.split(
                r"\s*(?:[,;/&+|]|\bor\b|\band\b)\s*", _bare(rest.lstrip().split("\n")[0])[len(begins) :], maxsplit=1
            )
            other = _begins(joined[1], by_text) if len(joined) > 1 and not joined[0].strip() else None
            return {by_text[begins], *([beside[1]] if beside else []), *([by_text[other]] if other else [])}
    return set()


def _begins(rest: str, by_text: Mapping[str, str]) -> str | None:
    """The longest text of a choice that the line begins with."""
    line = _bare(rest.lstrip().split("\n")[0])
    fits = [bare for bare in by_text if re.match(rf"(?:the )?{re.escape(bare)}(?![{_WORD}]|[.,/]\d)", line)]
    return max(fits, key=len, default=None)


def _begins_a_line(letters: str) -> str:
    mark = r"(?:[)\]:]|\.(?![A-Za-z]\.)|-[ \t]|(?m:$)|,?[ \t]*(?:because|since)\b)"
    return rf"(?m:^)[ \t>\-(\[]*([{letters}{letters.lower()}])[ \t]*{mark}"


def _marked(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    matches = [*re.finditer(_begins_a_line(letters), _without_row(text, letters, by_text))]
    found = {match[1].upper() for match in matches}
    if len(found) != 1:
        return set()  # it lists the choices, or has no such line
    at = re.compile(rf"([{letters}{letters.lower()}])").search(matches[0].string, matches[0].start(1))
    assert at is not None  # the letter that the line was matched by
    return _with_alternatives(matches[0].string, at, letters)


def _alone(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    """A letter within the text of a choice does not stand alone: C in "it is vitamin C"."""
    text = _without_lists(text, letters, by_text)
    inside = [match.span() for bare in by_text for match in re.finditer(re.escape(bare), text, re.IGNORECASE)]
    kept: list[re.Match[str]] = []
    for match in _letters(text, letters):
        if any(first <= match.start() < last for first, last in inside):
            continue
        before = text[max(0, match.start() - _AROUND) : match.start()]
        after = text[match.end() : match.end() + _AROUND]
        sentence = re.split(r"[.!?\n]", before)[-1]
        reason = _REASON.search(sentence) and kept and kept[-1].start() >= match.start() - len(sentence)
        row = re.match(rf"\s+[{letters}]{_ENDS_HERE}", after)
        sign = row or re.search(r"[<>=]\s*$", before) or re.match(r"\s*[<>=]", after)
        wrong = _WRONG.match(after) and not _RIGHT.match(after)
        if _BEFORE.search(before) and not (wrong or reason or sign or _RULED_OUT.search(before)):
            kept.append(match)
    joined = [_with_alternatives(text, match, letters) for match in kept]
    found = {match[1].upper() for match in kept}
    if len(found) < 2:
        return next((several for several in joined if len(several) > 1), found)
    said = {match[1].upper() for match in kept if _RIGHT.match(text[match.end() : match.end() + _AROUND])}
    if len(said) == 1:
        return said
    before = text[max(0, kept[-1].start() - _AROUND) : kept[-1].start()]
    at_the_end = re.search(r"[.!?\n]\W*$", before) and not re.search(r"\w", text[kept[-1].end() :])
    if at_the_end or _DECIDED.search(before):
        return next((several for several in joined if len(several) > 1 and kept[-1][1] in several), joined[-1])
    return found


def _without_lists(text: str, letters: str, by_text: Mapping[str, str]) -> str:
    """Without the choices, where the reply says several of them again."""
    lines = _begins_a_line(letters)
    if len({letter.upper() for letter in re.findall(lines, text)}) > 1:
        text = "\n".join(line for line in text.split("\n") if not re.match(lines, line))
    return _without_row(text, letters, by_text)


def _without_row(text: str, letters: str, by_text: Mapping[str, str]) -> str:
    """Without choices in a row: "A. Paris B. London C. Rome"."""
    texts = "|".join(rf"{letter}[).:]\s*{re.escape(bare)}" for bare, letter in by_text.items())
    one = rf"(?<![{_WORD}])[(\[]?(?:{texts})[\s.,;]*"
    return re.sub(rf"(?i)(?:{one}){{2,}}", "\n", text) if by_text else text


def _mentioned(text: str, letters: str, by_text: Mapping[str, str]) -> set[str]:
    bare = " ".join(text.split()).casefold()
    found = set()
    for choice in by_text:
        signed = "(?<![-/])" if choice[0].isdigit() else ""
        for match in re.finditer(rf"(?<![{_WORD}])(?<!\d[.,]){signed}{re.escape(choice)}(?![{_WORD}]|[.,/]\d)", bare):
            before, after = (
                bare[max(0, match.start() - _AROUND) : match.start()],
                bare[match.end() : match.end() + _AROUND],
            )
            if not _RULED_OUT.search(before) and (_RIGHT.match(after) or not _WRONG.match(after)):
                found.add(choice)
    return {by_text[choice] for choice in found if not any(choice != other and choice in other for other in found)}
