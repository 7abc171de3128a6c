# ruff: noqa: E501
"""What judges make of replies: right ones accepted, wrong ones refused, what cannot be read told."""

import asyncio

import pytest

from spmd_rl.envs.choice import chosen
from spmd_rl.judge import Judge, grade
from spmd_rl.math_reward import math_equals
from spmd_rl.rewards import contains_word, exact, fill, last_number_equals, matches, number_of, numbers
from spmd_rl.workers import TimedOut, Workers

MATH_RIGHT = [
    ("\\boxed{2\\sqrt{3}}", "2\\sqrt{3}"),
    ("\\boxed{x^2+3}", "x^2 + 3"),
    ("so $3 + x^2$", "x^2 + 3"),
    ("\\boxed{(1,2)}", "(1, 2)"),
    ("The point is $(1, 2)$.", "(1, 2)"),
    ("\\boxed{1234}", "1{,}234"),
    ("\\boxed{1,234}", "1{,}234"),
    ("\\boxed{1234}", "1,234"),
    ("1,234", "1234"),
    ("\\boxed{\\frac{1}{2}}", "1/2"),
    ("0.5", "\\frac{1}{2}"),
    ("\\boxed{\\tfrac{1}{2}}", "\\frac12"),
    ("\\boxed{0.75}", "\\dfrac{3}{4}"),
    ("\\boxed{1/2}", "$\\frac{1}{2}$"),
    ("$7$", "\\boxed{7}"),
    ("\\boxed{1+x}", "\\(x+1\\)"),
    ("5", "\\[5\\]"),
    ("so it is 42.", "42"),
    ("\\boxed{42}", "42"),
    ("\\boxed{-3}", "-3"),
    ("\\boxed{\\{3,2,1\\}}", "\\{1,2,3\\}"),
    ("\\boxed{[0,1)}", "[0,1)"),
    ("\\boxed{(-\\infty,3]}", "(-\\infty, 3]"),
    ("\\boxed{90^\\circ}", "90^\\circ"),
    ("\\boxed{90}", "90^\\circ"),
    ("\\boxed{50\\%}", "50\\%"),
    ("\\boxed{0.5}", "50\\%"),
    ("\\boxed{\\pi}", "\\pi"),
    ("\\boxed{2 \\pi r}", "2\\pi r"),
    ("\\boxed{100000}", "10^{5}"),
    ("\\boxed{30000}", "3 \\times 10^4"),
    ("\\boxed{1500}", "1.5e3"),
    ("\\boxed{\\text{even}}", "\\text{even}"),
    ("\\boxed{A}", "A"),
    ("\\boxed{\\text{(A)}}", "\\text{A}"),
    ("\\boxed{3}", "x = 3"),
    ("\\boxed{x = 3}", "3"),
    ("\\boxed{\\pm 2}", "\\pm 2"),
    ("\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("\\boxed{5}", "5\\text{ cm}"),
    ("\\boxed{5\\text{ cm}}", "5"),
    ("5", "5 cm"),
    ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}"),
    ("\\boxed{\\frac{5}{2}}", "2\\frac{1}{2}"),
    ("\\boxed{\\frac{1}{2}(x+1)}", "\\frac{x+1}{2}"),
    ("\\boxed{y=2x+1}", "y = 2x + 1"),
    ("\\boxed{3, 5}", "3, 5"),
    ("\\boxed{5,3}", "3,5"),
    ("\\boxed{\\log 2}", "\\log 2"),
    ("\\boxed{5040}", "7!"),
    ("\\boxed{18}", "\\$18"),
    ("18", "$18"),
    ("\\boxed{0.333}", "0.333"),
    ("\\boxed{\\sin x}", "\\sin(x)"),
    ("\\boxed{x \\ge 2}", "x \\geq 2"),
    ("\\boxed{12345}", "12\\ 345"),
    ("\\boxed{4i+3}", "3+4i"),
    ("\\boxed{|x|}", "|x|"),
    ("\\boxed{\\frac{1}{\\sqrt{3}}}", "\\frac{\\sqrt{3}}{3}"),
    ("\\boxed{1} no, \\boxed{2}", "2"),
    ("\\boxed{(1,2)}", "\\left(1, 2\\right)"),
    ("\\boxed{\\emptyset}", "\\emptyset"),
    ("\\boxed{\\infty}", "\\infty"),
    ("\\boxed{11:30}", "11:30"),
]  # (reply, answer)
MATH_WRONG = [
    ("\\boxed{2}", "2\\sqrt{3}"),
    ("\\boxed{3}", "2\\sqrt{3}"),
    ("\\boxed{\\sqrt{3}}", "2\\sqrt{3}"),
    ("\\boxed{3}", "x^2 + 3"),
    ("\\boxed{x^2}", "x^2 + 3"),
    ("\\boxed{1}", "(1, 2)"),
    ("\\boxed{2}", "(1, 2)"),
    ("\\boxed{(2,1)}", "(1, 2)"),
    ("\\boxed{12}", "(1, 2)"),
    ("\\boxed{1}", "1{,}234"),
    ("\\boxed{234}", "1{,}234"),
    ("\\boxed{1}", "1/2"),
    ("\\boxed{2}", "1/2"),
    ("\\boxed{12}", "\\frac12"),
    ("\\boxed{3}", "-3"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2,3\\}"),
    ("\\boxed{[0,1]}", "[0,1)"),
    ("\\boxed{(0,1)}", "[0,1)"),
    ("\\boxed{9}", "90^\\circ"),
    ("\\boxed{5}", "50\\%"),
    ("\\boxed{3.14}", "\\pi"),
    ("\\boxed{3}", "\\pi"),
    ("\\boxed{10}", "10^{5}"),
    ("\\boxed{5}", "10^{5}"),
    ("\\boxed{\\text{odd}}", "\\text{even}"),
    ("\\boxed{B}", "A"),
    ("\\boxed{2}", "\\pm 2"),
    ("", "5"),
    ("I do not know", "5"),
    ("about 4 or 6", "5"),
    ("\\boxed{8}", "\\sqrt{8}"),
    ("\\boxed{e}", "e^{x}"),
    ("\\boxed{1}", "2\\frac{1}{2}"),
    ("\\boxed{y = 2x}", "y = 2x + 1"),
    ("\\boxed{3}", "3, 5"),
    ("\\boxed{5}", "3, 5"),
    ("\\boxed{7}", "7!"),
    ("\\boxed{x > 2}", "x \\geq 2"),
    ("\\boxed{3}", "3+4i"),
    ("\\boxed{x}", "x^2"),
    ("\\boxed{3}", "\\frac{\\sqrt{3}}{3}"),
    ("\\boxed{2} or \\boxed{3}", "2"),
    ("\\boxed{x}", "x = 3"),
    ("\\boxed{\\frac{6}", "6"),
    ("\\boxed{1}", "12"),
    ("\\boxed{5}", "0.5"),
    ("\\boxed{\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
]
CHOICES = ["Vitamin A", "Vitamin B", "Vitamin C", "A cell"]
CHOSEN = [
    ("B) Vitamin C", "B"),
    ("(B) A cell", "B"),
    ("**B**", "B"),
    ("B", "B"),
    ("b", "B"),
    ("Answer: B.", "B"),
    ("The answer is (c)", "C"),
    ("the answer is c.", "C"),
    ("B because A is wrong", "B"),
    ("A or B", None),
    ("The answer is A or B.", None),
    ("Vitamin C", "C"),
    ("vitamin c.", "C"),
    ("\\boxed{B}", "B"),
    ("\\boxed{\\text{(B)}}", "B"),
    ("\\boxed{Vitamin C}", "C"),
    ("None of the above", None),
    ("I think A... no, B", "B"),
    ("E", None),
    ("A cell is a thing. So it is D.", "D"),
    ("A cell", "D"),
    ("It must be a cell", "D"),
    ("It is Vitamin B", "B"),
    ("I would choose C", "C"),
    ("Option D", "D"),
    ("A) Vitamin A\nB) Vitamin B\nC) Vitamin C\nD) A cell\n\nThe answer is C", "C"),
    ("A) Vitamin A is wrong\nB) is wrong\nSo C", "C"),
    ("B, not A", "B"),
    ("It is not A, it is B", "B"),
    ("<think>maybe A</think>B", "B"),
    ("<think>The answer is A</think>\n\n(D)", "D"),
    ("Answer: D) A cell", "D"),
    ("Answer:\nB", "B"),
    ("The correct answer is Vitamin C.", "C"),
    ("The correct answer is a cell", "D"),
    ("I'm sure it's C.", "C"),
    ("I have a cell", "D"),
    ("", None),
    ("because", None),
    ("C.", "C"),
    ("(C)", "C"),
    ("[C]", "C"),
    ("C: Vitamin C", "C"),
    ("Let A be x. The answer is B", "B"),
    ("$\\boxed{\\mathrm{C}}$", "C"),
    ("answer = C", "C"),
    ("A, B and C are wrong, so D", "D"),
    ("Choose either A or C", None),
    ("My choice: B", "B"),
    ("the answer is a", "A"),
    ("A", "A"),
    ("A.", "A"),
    ("A because it is", "A"),
    ("The letter is B.", "B"),
    ("Both A and B", None),
    ("I choose option B: Vitamin B", "B"),
    ("A is right", "A"),
    ("D is a cell", "D"),
    ("\\boxed{E}", None),
]
GRADES = [
    ("3/10", 0.3),
    ("0/10", 0),
    ("10/10", 1),
    ("7", 0.7),
    ("0.7", 0.07),
    ("I would say 7 of 10: 7.5", 0.7),
    ("Score: 7 out of 10", 0.7),
    ("**8**/10", 0.8),
    ("Rating: [[7]]", 0.7),
    ("7,5/10", 0.75),
    ("I'd give it 3 of 5", None),
    ("<think>maybe 2/10, or 9</think>6/10", 0.6),
    ("<think>3</think>", None),
    ("hm", None),
    ("40", None),
    ("-1", None),
    ("Score: 7 because it has 2 errors", 0.7),
    ("8/10 because 2 of the 3 steps are right", 0.8),
    ("The reply has 2 errors and 3 typos. 6", 0.6),
    ("6. The reply has 2 errors", None),
    ("Score: 7-8", None),
    ("70%", None),
    ("70/100", None),
    ('{"score": 7, "reason": "2 errors"}', 0.7),
    ("Clarity score: 3. Final score: 8", 0.8),
    ("score is 9.", 0.9),
    ("My grade: **9**", 0.9),
    ("10", 1),
    ("11", None),
    ("0", 0),
    ("", None),
    ("Grade: B", None),
    ("7/10.", 0.7),
    ("7 / 10", 0.7),
    ("(7/10)", 0.7),
    ("Rating = 4", 0.4),
    ("final verdict: 5", 0.5),
    (".5", 0.05),
    ("1e1", None),
    ("ten", None),
    ("Score: 7/10\nReason: it has 12 words", 0.7),
    ("7/10 and then 8/10", None),
    ("Score: 5 to 6", None),
    ("It scores 7 out of 10 overall", 0.7),
    ("The answer 42 is right", None),
    ("Score:\n\n9", 0.9),
    ("Score: 10 / 10 !", 1),
    ("Score: 0", 0.0),
    ("0.0", 0.0),
    ("3/10\n", 0.3),
    ("I rate this 3/10.", 0.3),
    ("Grade: 3/10 (poor)", 0.3),
    ("3 / 10 points", 0.3),
    ("3 points", 0.3),
    ("Score: 3 points out of 10", 0.3),
    ("3 out of a possible 10", 0.3),
    ("3 out of ten", None),
    ("three out of ten", None),
    ("Three", None),
    ("Score: **3**", 0.3),
    ("**Score:** 3", 0.3),
    ("**Score: 3**", 0.3),
    ("## Score\n3", 0.3),
    ("Score - 3", 0.3),
    ("Score → 3", 0.3),
    ("Score 3", 0.3),
    ("score:3", 0.3),
    ("SCORE: 3", 0.3),
    ("Score: 3.5", 0.35),
    ("Score: 3,5", 0.35),
    ("Score: 3.", 0.3),
    ("Score: -3", None),
    ("Score: −3", None),
    ("Score: +3", 0.3),
    ("Score: 11", None),
    ("Score: 100", None),
    ("Score: 3%", None),
    ("30%", None),
    ("\\boxed{3}", 0.3),
    ("$\\boxed{3}$", 0.3),
    ("[3]", 0.3),
    ("<score>3</score>", 0.3),
    ("<score> 3 </score> because it has 2 faults", 0.3),
    ("<answer>3</answer>", 0.3),
    ('{"score": 3}', 0.3),
    ('{"score": "3"}', 0.3),
    ('{"score": 3.0, "max": 10}', 0.3),
    ('```json\n{"score": 3}\n```', 0.3),
    ('{"reasoning": "2 errors in 5 lines", "score": 3}', 0.3),
    ('{"score": 3, "reasoning": "2 errors in 5 lines, I gave 7 before"}', 0.3),
    ('{"grade":0}', 0.0),
    ("The reply has 2 errors. Score: 3/10. If it had 0 errors it would be 10/10.", None),
    ("A perfect reply gets 10/10. This gets 3/10.", None),
    ("This gets 3/10. A perfect reply gets 10/10.", None),
    ("On a scale of 0 to 10: 3", 0.3),
    ("On a scale from 0 to 10, I give 3", 0.3),
    ("On a scale of 0-10, this is a 3 for clarity", 0.3),
    ("I give it a 3 on a scale of 0 to 10.", 0.3),
    ("I would rate it 3 on a scale of 1-10", 0.3),
    ("On a scale of 1 to 10, I'd say 3.", 0.3),
    ("Score (0-10): 3", 0.3),
    ("Score (out of 10): 3", 0.3),
    ("Score out of 10: 3", 0.3),
    ("Score [0-10] = 3", 0.3),
    ("3 (out of 10)", 0.3),
    ("3 (on a scale of 0 to 10)", 0.3),
    ("Score: 3 (scale 0-10)", 0.3),
    ("3/10 on a 0-10 scale", 0.3),
    ("Accuracy: 3/10\nClarity: 7/10\nOverall: 5/10", 0.5),
    ("Accuracy: 3/10, Clarity: 7/10", None),
    ("1. Correct: 8/10\n2. Clear: 4/10\nFinal score: 6/10", 0.6),
    ("Final score: 6/10\n1. Correct: 8/10\n2. Clear: 4/10", 0.6),
    ("Overall score: 6\nCorrectness score: 8", 0.6),
    ("3/5", None),
    ("3/100", None),
    ("3/10/2024", None),
    ("2024-01-03", None),
    ("1/2", None),
    ("3/4 of it is right: 7/10", 0.7),
    ("7/10, since 3/4 of it is right", 0.7),
    ("Step 1 is right, step 2 is wrong.", None),
    ("Step 1 is right, step 2 is wrong. 5", 0.5),
    ("The final answer is 8.", None),
    ("The student's answer 8 is right. Score: 10", 1.0),
    ("The answer should be 12 but they say 8. Score: 0", 0.0),
    ("Score: 0. The answer should be 12", 0.0),
    ("Correct answer: 8", None),
    ("The mark is 3", 0.3),
    ("Marks: 3/10", 0.3),
    ("I deduct 3 points", None),
    ("minus 3", None),
    ("It loses 3 points, so 7", None),
    ("7 (10 - 3)", None),
    ("10 - 3 = 7", None),
    ("Score: 10 - 3 = 7", None),
    ("Score = 10-3", None),
    ("Score: 3 + 4 = 7", None),
    ("Score: 3+4", None),
    ("Score: ~3", 0.3),
    ("about 3", 0.3),
    ("between 3 and 4", None),
    ("3 or 4", None),
    ("Score: 3 or 4", None),
    ("3 to 4", None),
    ("3–4/10", None),
    ("3-4/10", None),
    ("Score: 3/10 - 4/10", None),
    ("Score: <3", None),
    ("less than 3", None),
    ("at least 3", None),
    ("≥3", None),
    ("Score: N/A", None),
    ("N/A", None),
    ("I can't grade this.", None),
    ("I cannot give more than 3", None),
    ("<think>8/10</think>\n3/10", 0.3),
    ("<think>8/10", None),
    ("8/10</think>3/10", 0.3),
    ("<thinking>8/10</thinking>3/10", 0.3),
    ("3️⃣", None),
    ("３/１０", 0.3),
    ("٣", 0.3),
    ("3e0", None),
    ("3.0/10.0", 0.3),
    ("3.0/10", 0.3),
    ("03/10", 0.3),
    ("[[3]] [[4]]", None),
    ("[[3]]\n[[3]]", 0.3),
    ("[[3/10]]", 0.3),
    ("[[11]]", None),
    ("[[A]]", None),
    ("Rating: [[3]] of 10, 2 faults", 0.3),
    ("Rating: [3], 2 faults", 0.3),
    ("Score:\n3/10\n\nReasons:\n1. x\n2. y", 0.3),
    ("Score: 3\n\nReasons:\n1. x\n2. y\n3", 0.3),
    ("Reasons:\n1. x\n2. y\nScore: 3", 0.3),
    ("1. x\n2. y", None),
    ("1. The reply is wrong.", None),
    ("Score: three", None),
    ("Score is 3, not 8", 0.3),
    ("Not 8 but 3", None),
    ("I changed my mind from 8/10 to 3/10.", None),
    ("Score: 8. Actually, Score: 3.", None),
    ("1", 0.1),
    ("1.0", 0.1),
    ("0.3", 0.03),
    ("100", None),
    ("1000", None),
    ("10.0", 1.0),
    ("10.5", None),
    ("9.99", 0.999),
    ("7/10!", 0.7),
    ("7/10 :)", 0.7),
    ("7/10 ⭐", 0.7),
    ("★★★☆☆", None),
    ("7.5/10", 0.75),
    ("7½/10", None),
    ("7 1/2", None),
    ("The score is: 7", 0.7),
    ("I'd score this 7", 0.7),
    ("I'd score this a 7 because it has 3 flaws", 0.7),
    ("I'd give this a 7 because it has 3 flaws", None),
    ("Rated 7 of 10", 0.7),
    ("7 from 10", None),
    ("7 over 10", None),
    ("Score = 7 / 10 = 0.7", 0.7),
    ("7/10 (70%)", 0.7),
    ("7/10 = 70%", 0.7),
    ("70% (7/10)", 0.7),
    ("7/10 or 0.7", 0.7),
    ("score of 7", 0.7),
    ("a grade of 7 for 5 lines", 0.7),
    ("Score 7/10 because 9/10 tests pass", None),
]  # of 10
NUMBERS = [
    ("5", 5, 1),
    ("5", "5", 1),
    (".5", 0.5, 1),
    (".5", "0.5", 1),
    ("-.5", "-0.5", 1),
    (".5", "5", 0),
    ("18", "$18", 1),
    ("It costs $18.", "18", 1),
    ("It costs -$18.", "-18", 1),
    ("18 dollars", "18 apples", 1),
    ("1,234.50", "1234.5", 1),
    ("1234.5", "1,234.50", 1),
    ("50%", "50", 1),
    ("50", "50%", 1),
    ("1e5", "100000", 1),
    ("1.5e-3", "0.0015", 1),
    ("2 × 10^3", "2000", 1),
    ("2 \\times 10^{3}", "2000", 1),
    ("1/2", "0.5", 1),
    ("1/2", "2", 0),
    ("0.5", "1/2", 1),
    ("3 1/2", "3.5", 1),
    ("3 1/2", "2", 0),
    ("\\frac{1}{2}", "0.5", 1),
    ("\\boxed{\\frac12}", "1/2", 1),
    ("½", "0.5", 1),
    ("−5", "-5", 1),
    ("-5", "5", 0),
    ("5 - 3", "3", 1),
    ("5-3", "3", 1),
    ("5-3", "-3", 0),
    ("so it is = 42.", "42", 1),
    ("The area is 50 m2", "50", 1),
    ("The area is 50 m²", "50", 1),
    ("50 m^2", "50", 1),
    ("2^5", "32", 1),
    ("2^5", "5", 0),
    ("x^2", "2", 0),
    ("H2O", "2", 0),
    ("10:30", "30", 1),
    ("2024-01-05", "5", 1),
    ("2024-01-05", "-5", 0),
    ("12/25/2020", "2020", 1),
    ("GPT-4 says 7", "7", 1),
    ("1{,}234", "1234", 1),
    ("1\\,234", "1234", 1),
    ("1_000", "1000", 1),
    ("１８", "18", 1),
    ("٣", "3", 1),
    ("none", "7", 0),
    ("", "7", 0),
    ("7 or 8", "7", 0),
    ("7 or 8", "8", 1),
    ("[1, 2, 3]", "3", 1),
    ("1,2,3", "3", 1),
    ("**42**", "42", 1),
    ("$42$", "42", 1),
    (
        "9999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999",
        "9999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999",
        1,
    ),
    ("0", "0", 1),
    ("-0", "0", 1),
    ("0.30000000000000004", "0.3", 0),
    ("3.0", "3", 1),
    ("3/0", "3", 0),
    ("£5.50", "5.5", 1),
    ("€ 20", "20", 1),
    (" 7th of 9", "9", 1),
    ("5kg", "5", 1),
    ("(3)", "3", 1),
    ("7*6=42", "42", 1),
    ("10^{5}", "100000", 1),
    ("1/2/3", "3", 1),
    ("1234567890123456789012345678901", "1234567890123456789012345678902", 0),
    ("-1234567890123456789012345678901", "-1234567890123456789012345678902", 0),
    ("0.1234567", 0.1234567, 1),
    ("0.123457", 0.1234567, 0),
    ("0", 1e-7, 0),
    ("0.0000001", 1e-7, 1),
    ("10000000000000000000000", 1e22, 1),
    ("$\\frac{-1}{2}$", "-0.5", 1),
    ("$-\\frac{1}{2}$", "-0.5", 1),
    ("\\frac{1.5}{2}", "0.75", 1),
    ("\\frac{x}{2}", "2", 0),
    ("\\boxed{3\\frac{1}{2}}", "3.5", 1),
    ("\\boxed{3 \\frac{1}{2}}", "0.5", 0),
    ("2 ½", "2.5", 1),
    ("2½", "2.5", 1),
    ("x = - 5", "-5", 1),
    ("x = - 5", "5", 0),
    ("\\sqrt{9}", "9", 0),
    ("√9", "9", 0),
    ("3, so 2\\sqrt{3}", "3", 0),
    ("2\\pi", "2", 0),
    ("2π", "2", 0),
    ("12π ≈ 37.7", "37.7", 1),
    ("(-2)^2", "-2", 0),
    ("50\\text{ cm}^2", "50", 1),
    ("10²", "100", 1),
    ("6.02×10²³", "602000000000000000000000", 1),
    ("2^{-1}", "0.5", 1),
    ("_7_", "7", 1),
    ("x_1", "1", 0),
    ("a_{12}", "12", 0),
    ("1'234", "1234", 1),
    ("1\N{THIN SPACE}234", "1234", 1),
    ("１，２３４", "1234", 1),
    ("1,2,345", "345", 1),
    ("12345,678", "678", 1),
    ("2 million", "2000000", 1),
    ("2 million", "2", 0),
    ("1.5 thousand", "1500", 1),
    ("is –5", "-5", 1),
    ("3–4", "4", 1),
    ("0x10", "10", 0),
    ("1.234.567", "1.234", 0),
    ("version 1.2.3", "3", 0),
    ("$-500", "-500", 1),
    ("#### 42", "42", 1),
    ("90^\\circ", "90", 1),
    ("25°", "25", 1),
    ("1e400000", "1", 0),
]  # (reply, answer, right)
NO_NUMBERS = [
    "", "abc", "10:30", "1 or 2", None, True, float("nan"), float("inf"), "x^2", [5], {"a": 5}, "1,2",
    "2024-01-05", "5-3", "five", "2\\pi", "2\\sqrt{3}", "\\sqrt{9}", "√2", "x^2 + 3", "3x", "3 x 4", "10!", "log 5", "3i",
    "1+2i", "0x1F", "1.234.567", "€1.234,56", "\\frac{a}{2}", "±5", "7 8", "(3, 4)", "5k",
]  # fmt: skip
ANSWERS = [
    ("18%", "18"), ("x = 18", "18"), ("18.", "18"), ("\\boxed{18}", "18"), ("18 m^2", "18"), ("18 m2", "18"), ("18 km/h", "18"),
    ("US$18", "18"), ("18 (about)", "18"), ("50^\\circ", "50"), ("+5", "5"), ("3 1/2", "3.5"), ("10^6", "1000000"), (-18, "-18"),
    ("1e5", "100000"), ("½", "0.5"), ("2 million", "2000000"), ("-3/4", "-0.75"), (" 18\n", "18"), (0.5, "1/2"), (1e-7, "1e-7"),
]  # fmt: skip
WORDS = [
    ("the cat sat", "cat", 1), ("concatenate", "cat", 0), ("Cat.", "Cat", 1), ("cat", "Cat", 0), ("(cat)", "cat", 1),
    ("a cat-like", "cat", 1), ("cats", "cat", 0), ("c++ is", "c++", 1), ("New York City", "New York", 1),
    ("", "cat", 0), ("naïve", "na", 0), ("12", "1", 0), ("漢字 is", "漢字", 1), ("a.b", "a.b", 1), ("axb", "a.b", 0),
    ("the\ncat\n", "cat", 1), ("cat", "cat sat", 0), ("it's", "it", 1), ("_cat_", "cat", 0), ("cat!", "cat!", 1),
]  # fmt: skip
EXACT = [
    ("Paris", "Paris", 1), (" Paris\n", "Paris", 1), ("paris", "Paris", 0), ("Paris.", "Paris", 0), ("", "", 1),
    ("Pa ris", "Paris", 0), ("Paris", "Paris ", 1), ("5", "5", 1), ("5.0", "5", 0), ("é", "e", 0),
]  # fmt: skip
FORMS = [
    ("<a>1</a>", r"<a>\d</a>", 1), (" <a>1</a>\n", r"<a>\d</a>", 1), ("x<a>1</a>", r"<a>\d</a>", 0), ("a\nb", "a.b", 1),
    ("ab", "a", 0), ("", "a?", 1), ("one two.", r"(\S+\s*)+\.", 1), ("<think>x</think>7", r"<think>.*</think>\s*\d+", 1),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "answer"), MATH_RIGHT)
def test_equal_mathematics_is_accepted(reply, answer):
    pytest.importorskip("math_verify")
    assert math_equals(reply, answer) == 1.0


@pytest.mark.parametrize(("reply", "answer"), MATH_WRONG)
def test_other_mathematics_is_refused(reply, answer):
    pytest.importorskip("math_verify")
    assert math_equals(reply, answer) == 0.0


def test_any_of_several_answers_is_right():
    pytest.importorskip("math_verify")
    assert math_equals("$0.5$", ["7", "\\frac{1}{2}"]) == 1.0 and math_equals("$0.5$", ["7", "8"]) == 0.0


@pytest.mark.parametrize("answer", ["", "$$", "  "])
def test_an_answer_without_mathematics_is_named(answer):
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="no mathematical expression in the answer"):
        math_equals("$1$", answer)


@pytest.mark.parametrize(("reply", "letter"), CHOSEN)
def test_the_chosen_letter(reply, letter):
    assert chosen(reply, CHOICES) == letter


@pytest.mark.parametrize(
    ("reply", "choices", "letter"),
    [
        ("5", ["5", "6"], "A"),
        ("The answer is 6", ["5", "6", "16"], "B"),
        ("16", ["5", "6", "16"], "C"),
        ("It is blue", ["red", "blue", "dark blue"], "B"),
        ("It is dark blue", ["red", "blue", "dark blue"], "C"),
        ("Answer: dark blue", ["red", "blue", "dark blue"], "C"),
        ("E", ["a", "b", "c", "d", "e"], "E"),
        ("I", ["a"] * 8 + ["b"], "I"),
        ("It is vitamin C.", ["A cell", "Vitamin C", "Paris"], "B"),
        ("So hepatitis B, I think", ["Hepatitis A", "Rabies", "Hepatitis B"], "C"),
        ("Not vitamin C, so A", ["Vitamin A", "Vitamin C"], "A"),
        ("It is dopa D2 and C", ["dopa D2", "D2", "x"], "C"),
        ("A", ["[0,1]", "(0,1)", "[0,1)"], "A"),
        ("(0,1)", ["[0,1]", "(0,1)", "[0,1)"], "B"),
        ("The answer is B", ["5!", "5", "25"], "B"),
        ("$5!$", ["5!", "5", "25"], "A"),
        ("Pp", ["PP", "pp", "Pp"], "C"),
        ("it is pp", ["PP", "pp", "Pp"], None),
    ],
)
def test_the_chosen_text(reply, choices, letter):
    assert chosen(reply, choices) == letter


@pytest.mark.parametrize(("said", "share"), GRADES)
def test_a_grade_is_read_or_none_is(said, share):
    assert grade(said, 10.0) == (share if share is None else pytest.approx(share))


def test_another_scale():
    assert (grade("70%", 100.0), grade("70/100", 100.0), grade("1/1", 1.0), grade("4/5", 5.0)) == (None, 0.7, 1.0, 0.8)


@pytest.mark.parametrize(("reply", "answer", "right"), NUMBERS)
def test_the_last_number(reply, answer, right):
    assert last_number_equals(reply, answer) == right


@pytest.mark.parametrize("answer", NO_NUMBERS, ids=repr)
def test_an_answer_that_is_no_number_is_named(answer):
    with pytest.raises(ValueError, match="is not a number"):
        number_of(answer)


@pytest.mark.parametrize(("answer", "reply"), ANSWERS, ids=repr)
def test_an_answer_is_the_number_in_it(answer, reply):
    assert last_number_equals(reply, answer) == 1.0


@pytest.mark.parametrize(
    "text",
    ["1", "1,", "-", "1/", "a^", " 1", "\\frac", "x", "1 1/", "}", "2^", "$", "e1", ".", "1e", "\\sqrt{", "1.2."],
)
def test_a_long_reply_is_read_at_once(text):
    """Each of these ten thousand times: a pattern that looks back and forth would never end."""
    numbers(text * 10_000)
    grade(text * 10_000, 10.0)
    chosen(text * 10_000, CHOICES)


@pytest.mark.parametrize(("reply", "word", "right"), WORDS)
def test_a_word(reply, word, right):
    assert contains_word(reply, word) == right


@pytest.mark.parametrize(("reply", "answer", "right"), EXACT)
def test_exact(reply, answer, right):
    assert exact(reply, answer) == right


@pytest.mark.parametrize(("reply", "form", "right"), FORMS)
def test_a_form(reply, form, right):
    assert matches(reply, form) == right


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{question} Use \\boxed{}.", "Q Use \\boxed{}."),
        ('{question} {"a": {"b": 1}}', 'Q {"a": {"b": 1}}'),
        ("{{question}}", "{Q}"),
        ("\\frac{a}{b} {question} {other}", "\\frac{a}{b} Q {other}"),
        ("{question}{question}", "QQ"),
        ("{question!r:>5} {question}", "{question!r:>5} Q"),
        ("{reply}", "{question}"),
    ],
)
def test_a_template_is_filled_by_known_names_alone(template, filled):
    assert fill(template, {"question": "Q", "reply": "{question}"}) == filled


def test_a_template_without_what_it_needs_is_refused():
    with pytest.raises(ValueError, match=r"does not contain \{question\}"):
        fill("{qestion}", {"question": "Q"}, needed=("question",))
    with pytest.raises(ValueError, match=r"does not contain \{reply\}"):
        Judge(url="http://x/v1", model="m", prompt="grade this")
    Judge(url="http://x/v1", model="m", prompt='{"score": 0} {reply}')


def test_what_takes_for_ever_is_killed_and_named():
    pytest.importorskip("math_verify")

    async def main():
        workers = Workers(num=2, timeout_s=2.0)
        try:
            with pytest.raises(TimedOut, match=r"spmd_rl\.rewards:matches did not end within 2 s"):
                await workers.call(matches, "word " * 40, r"(\S+\s*)+\.")
            return await asyncio.gather(
                workers.call(math_equals, "$9^{9^{9^9}}$", "2"), workers.call(matches, "a", "a"), return_exceptions=True
            )
        finally:
            await workers.close()

    power, form = asyncio.run(main())
    assert isinstance(power, TimedOut) or power == 0.0
    assert form == 1.0
