import math

import pytest

from spmd_rl.rewards.text import (
    after,
    applicable,
    between,
    contains_word,
    exact,
    last_number_equals,
    matches,
    numbers,
    share_of,
    weighted_sum,
)


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("3 + 8 is equal to 11.", 11, True),
        ("11 is 3 + 8", 11, False),
        ("no number here", 11, False),
        ("", 0, False),
        ("The sum is 1,234.", 1234, True),
        ("It is 9.0", 9, True),
        ("2 - 8 = -6", -6, True),
        ("2 - 8 = \N{MINUS SIGN}6", "-6", True),
        ("10-8", 8, True),
        ("10-8", -8, False),
        ("1, 2", 2, True),
        ("12345678901234567890123", 12345678901234567890124, False),
    ],
)
def test_the_last_number_of_the_reply_is_judged(reply, answer, right):
    assert last_number_equals(reply, answer) == float(right)


def test_a_number_within_the_tolerance_is_right():
    assert last_number_equals("about 3.14", 3.1416, tolerance=0.01) == 1.0
    assert last_number_equals("about 3.1", 3.1416, tolerance=0.01) == 0.0


def test_a_tolerance_may_be_relative():
    assert last_number_equals("about 1010", "1,000", relative=0.01) == 1.0
    assert last_number_equals("about 1011", 1000, relative=0.01) == 0.0
    assert last_number_equals("-1010", -1000, relative=0.01) == 1.0


@pytest.mark.parametrize(
    ("reply", "right"),
    [("<think>a\nb</think> 7", 1.0), (" <think></think>7\n", 1.0), ("7", 0.0), ("x<think>a</think>7", 0.0)],
)
def test_a_format_is_a_pattern_of_the_whole_reply(reply, right):
    assert matches(reply, r"<think>.*</think>\s*\d+") == right


def test_answers_are_cut_out_by_their_marks():
    assert after("It is 40 + 2.\n#### 42", "####") == "42"
    assert after("42", "####") == "42"
    assert between("<answer>1</answer> no, <answer> 2 </answer>", "<answer>", "</answer>") == "2"
    assert between("<answer>1", "<answer>", "</answer>") is None
    assert between("1</answer>", "<answer>", "</answer>") is None


def test_numbers_are_found_in_order():
    assert [str(n) for n in numbers("1,234 - 5 is 1229.0.")] == ["1234", "5", "1229.0"]


def test_exact_ignores_only_the_blanks_around():
    assert exact(" Paris\n", "Paris") == 1.0
    assert exact("Paris.", "Paris") == 0.0


def test_a_word_inside_another_is_not_contained():
    assert contains_word("the cat sat", "cat") == 1.0
    assert contains_word("concatenate", "cat") == 0.0


def test_a_short_reply_has_a_small_share():
    assert share_of("aXe", "aeiou", length=4) == 0.5


def test_weights_make_one_reward_of_the_parts():
    assert weighted_sum({"right": 1, "format": 0}, {"right": 0.7, "format": 0.3}) == 0.7


def test_a_part_that_does_not_apply_adds_nothing_and_is_not_logged():
    parts = {"right": 1.0, "code": None}
    assert weighted_sum(parts) == 1.0
    assert applicable(parts) == {"right": 1.0}


def test_a_nan_is_an_error_and_never_averaged():
    with pytest.raises(ValueError, match="'right' is NaN"):
        weighted_sum({"right": math.nan, "format": 1.0})


def test_a_reward_of_no_parts_is_an_error():
    with pytest.raises(ValueError, match="no part"):
        weighted_sum({"code": None})


def test_a_part_without_a_weight_is_an_error():
    with pytest.raises(ValueError, match="'style' has no weight"):
        weighted_sum({"style": 1.0}, {"right": 1.0})
