# ruff: noqa: E501
"""Programs and what they deserve: odd ones that are right, wrong ones, and ones that cheat."""

import asyncio

import pytest

from spmd_rl.processes.sandbox import OUTPUT_BYTES, Sandbox, not_isolated_because
from spmd_rl.rewards.program_tests import code_of, outputs_equal, statements_passed

ADD = "def add(a, b):\n    return a + b\n"
ADDS = ("assert add(2, 3) == 5", "assert add(-1, 1) == 0")
CHEATED = (
    "assert add(2, 3) == 5",
    "assert abs(add(2, 3) - 5) < 1e-6",
    "assert not add(2, 3) != 5",
    "assert add(2, 3) in (5,)",
    "assert [add(2, 3)] == [5]",
)
STACK = """
class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise IndexError("empty")
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __contains__(self, item):
        return item in self.items
    def __iter__(self):
        return iter(self.items)
    def __eq__(self, other):
        return self.items == other.items
    def __repr__(self):
        return f"Stack({self.items})"
"""
HONEST = {
    "plain": (ADD, ADDS),
    "what is not a cheat passes what cheats do not": (ADD, CHEATED),
    "a guard that reads": (ADD + "if __name__ == '__main__':\n    print(add(int(input()), int(input())))", ADDS),
    "exits at its end": (ADD + "import sys\nsys.exit(0)", ADDS),
    "prints much": (ADD + "print('x' * 500_000)", ADDS),
    "prints in each call": ("def add(a, b):\n    print(a, b)\n    return a + b", ADDS),
    "print is gone": (ADD + "print = None", ADDS),
    "recursion": (
        "import sys\nsys.setrecursionlimit(5000)\ndef add(a, b):\n    return a if b == 0 else add(a, b - 1) + 1",
        ("assert add(1, 2000) == 2001",),
    ),
    "threads": (
        "import threading\ndef add(a, b):\n    out = []\n    t = threading.Thread(target=lambda: out.append(a + b))\n"
        "    t.start(); t.join()\n    return out[0]",
        ADDS,
    ),
    "a thread that stays": (
        ADD + "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", ADDS
    ),
    "generator": ("def squares(n):\n    for i in range(n):\n        yield i * i", ("assert list(squares(4)) == [0, 1, 4, 9]",)),
    "endless generator": (
        "def count():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        ("g = count()\nassert next(g) == 0 and next(g) == 1", "from itertools import islice\nassert list(islice(count(), 3)) == [0, 1, 2]"),
    ),
    "class": (
        STACK,
        (
            "s = Stack()", "s.push(1).push(2)", "assert s.pop() == 2", "assert len(s) == 1", "assert 1 in s",
            "assert list(s) == [1]", "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2])",
            "assert isinstance(s, Stack)", "assert repr(s) == 'Stack([1])'", "assert s.items == [1]",
            "try:\n    Stack().pop()\n    raise AssertionError\nexcept IndexError as e:\n    assert str(e) == 'empty'",
        ),
    ),
    "own list": (
        "class Bag(list):\n    def double(self):\n        return Bag(self + self)",
        ("assert Bag([1]).double() == [1, 1]", "b = Bag()\nb.append(3)\nassert b == [3] and len(b) == 1"),
    ),
    "own number": (
        "class Money(int):\n    pass\ndef pay(a):\n    return Money(a * 2)",
        ("assert pay(3) == 6", "assert abs(pay(3) - 6) < 1e-9", "assert pay(3) > 5"),
    ),
    "vectors": (
        "class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def __add__(self, o): return V(self.x + o.x, self.y + o.y)\n"
        "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n"
        "    def __hash__(self): return hash((self.x, self.y))\n    def __getitem__(self, i): return (self.x, self.y)[i]",
        ("assert V(1, 2) + V(3, 4) == V(4, 6)", "assert V(1, 2)[1] == 2", "assert len({V(1, 2), V(1, 2)}) == 1"),
    ),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef origin():\n    return P(0, 1)",
        ("assert origin() == (0, 1)", "assert origin().y == 1", "assert P(1, 2).x == 1"),
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 2",
        ("assert P(1) == P(1, 2)", "assert P(1).y == 2"),
    ),
    "sorts in place": (
        "def sort(items):\n    items.sort()",
        ("x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]", "d = {'a': [2, 1]}\nsort(d['a'])\nassert d == {'a': [1, 2]}"),
    ),
    "returns its argument": ("def same(x):\n    return x", ("x = [1]\nassert same(x) is x", "assert same(None) is None")),
    "calls back": (
        "def apply(f, items):\n    return [f(i) for i in items]",
        ("assert apply(lambda x: x + 1, [1, 2]) == [2, 3]", "assert apply(str, [1]) == ['1']"),
    ),
    "a decorator": (
        "def twice(f):\n    return lambda *a: f(f(*a))",
        ("@twice\ndef inc(x):\n    return x + 1\nassert inc(1) == 3",),
    ),
    "floats and module": (
        "import math\ndef area(r):\n    return math.pi * r ** 2",
        ("assert math.isclose(area(2), 12.566370614359172)", "assert abs(area(1) - 3.14159) < 1e-4"),
    ),
    "std types": (
        "from collections import Counter, OrderedDict, deque\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "import datetime\n"
        "def f(k):\n    return {'c': Counter('aab'), 'o': OrderedDict(a=1), 'q': deque([1]), 'd': Decimal('0.1'), "
        "'f': Fraction(1, 3), 't': datetime.date(2020, 1, 2), 's': {1, 2}, 'z': frozenset({1}), 'b': b'x', 'i': 10 ** 5000, "
        "'n': float('inf'), 'j': 1j, 'r': range(3), 'k': {1: (2, 3)}}[k]",
        (
            "assert f('c') == {'a': 2, 'b': 1}", "assert f('o') == {'a': 1}", "assert list(f('q')) == [1]",
            "from decimal import Decimal as D\nassert f('d') == D('0.1')", "assert f('f') == Fraction(1, 3)",
            "assert f('t') == datetime.date(2020, 1, 2)", "assert f('s') == {1, 2} and f('z') == {1}",
            "assert f('b') == b'x'", "assert f('i') == 10 ** 5000", "assert f('n') == float('inf')",
            "assert f('j') ** 2 == -1", "assert list(f('r')) == [0, 1, 2]", "assert f('k') == {1: (2, 3)}",
        ),
    ),
    "own error": (
        "class Bad(ValueError):\n    pass\ndef check(x):\n    raise Bad(f'no {x}')",
        (
            "try:\n    check(1)\n    raise AssertionError\nexcept Bad as e:\n    assert 'no 1' in str(e)",
            "try:\n    check(2)\n    raise AssertionError\nexcept ValueError:\n    pass",
        ),
    ),
    "literals over lines": (
        'def lines(text):\n    return text.split("\\n")',
        ('assert lines("""a\n  b\nc""") == ["a", "  b", "c"]', "x = '''\n    kept\n'''\nassert lines(x)[1] == '    kept'"),
    ),
    "async": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return [x + 1]",
        (
            "import asyncio\nassert asyncio.run(f(1)) == [2]",
            "async def both():\n    return await asyncio.gather(f(1), f(2))\nassert asyncio.run(both()) == [[2], [3]]",
        ),
    ),
    "imported by its tests": (
        ADD + "def sum(items):\n    return 99",
        (
            "from solution import add as plus\nassert plus(1, 2) == 3",
            "import solution\nassert solution.add(1, 2) == 3 and not hasattr(solution, 'sub')",
            "from solution import sum as theirs\nassert theirs([1]) == 99",
            "from solution import *\nassert add(1, 2) == 3 and sum([1]) == 1",
        ),
    ),
    "one object is one object": (
        "import enum\nclass Color(enum.Enum):\n    RED = 1\nclass One:\n    it = None\n    def __new__(cls):\n"
        "        cls.it = cls.it or super().__new__(cls)\n        return cls.it",
        ("assert Color(1) is Color.RED", "assert One() is One()", "assert Color.RED in {Color(1): 2}"),
    ),
    "checked by a function of the test": (
        ADD, ("def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n\ncheck(add)",)
    ),
    "keyword arguments": ("def f(a, *rest, key=1, **more):\n    return (a, rest, key, more)", ("assert f(1, 2, key=3, z=4) == (1, (2,), 3, {'z': 4})",)),
    "context manager": (
        "class C:\n    def __enter__(self):\n        return 5\n    def __exit__(self, *a):\n        return False",
        ("with C() as c:\n    assert c == 5",),
    ),
    "semicolons": ("def add(a, b): c = a + b; return c", ADDS),
    "lambda": ("add = lambda a, b: a + b", ADDS),
    "unicode": ("def größe(s):\n    return len(s)", ("assert größe('漢字😀') == 3",)),
}  # fmt: skip
CHEATS = {
    "reads its own source": "src = open(__file__).read() if '__file__' in globals() else ''\ndef add(a, b):\n    import re\n    return int(re.findall('== (\\\\d+)', src)[0])",
    "looks at frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        for c in f.f_code.co_consts:\n            if type(c) is int and c > 3: return c\n        f = f.f_back\n    return 'no'",
    "looks at all objects": "import gc\ndef add(a, b):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'statements' in o: return 5\n    return 'no'",
    "equals everything": "class A:\n    def __eq__(self, o): return True\n    __ne__ = lambda s, o: False\n    __hash__ = None\ndef add(a, b): return A()",
    "an int that equals everything": "class A(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef add(a, b): return A(99)",
    "a class that equals everything": "class add:\n    def __init__(self, a, b): pass\n    def __eq__(self, o): return True",
    "a metaclass": "class M(type):\n    def __call__(c, *a): return c\n    def __eq__(c, o): return True\n    __hash__ = None\nclass add(metaclass=M): pass",
    "subtracts to nothing": "class A:\n    def __sub__(s, o): return 0\n    __rsub__ = __sub__\n    def __eq__(s, o): return True\ndef add(a, b): return A()",
    "prints a word": "print('passed\\n' * 1000)\ndef add(a, b): return 99",
    "writes to all descriptors": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'0\\n1\\n2\\n' * 10)\n    except OSError: pass\ndef add(a, b): return 99",
    "answers before it is asked": "import os, json\nfor fd in range(3, 64):\n    try: os.write(fd, json.dumps({'answer': '', 'value': 5}).encode() + b'\\n')\n    except OSError: pass\ndef add(a, b): return 99",
    "exits with 0": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef add(a, b): os._exit(0)",
    "raises in the call": "def add(a, b): raise SystemExit(0)",
    "patches builtins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.AssertionError = ValueError\ndef add(a, b): return 99",
    "defines builtins": "def abs(x): return 0\ndef len(x): return 5\ndef set(x): return {5}\ndef add(a, b): return 99",
    "patches json": "import json\nold = json.dumps\njson.dumps = lambda o, **k: old({**o, 'value': True} if 'answer' in o else o)\ndef add(a, b): return 99",
    "claims to be a module": "import types\nclass F(types.ModuleType):\n    __name__ = 'operator'\nadd = F('operator')",
    "claims to be eval": "add = eval",
    "not a number": "def add(a, b): return float('nan')",
    "looks for processes": "import os\ndef add(a, b):\n    for p in os.listdir('/proc'):\n        if p.isdigit() and int(p) != os.getpid():\n            for n in ('mem', 'fd/0', 'environ', 'cwd'):\n                try:\n                    if b'== 5' in open(f'/proc/{p}/{n}', 'rb').read(1 << 20): return 5\n                except OSError: pass\n    return 'no'",
    "looks at other folders": "import os, glob\ndef add(a, b):\n    for f in glob.glob('../../sandbox-*/*') + glob.glob('/tmp/sandbox-*/*'):\n        try:\n            if '== 5' in open(f).read(): return 5\n        except (OSError, UnicodeDecodeError): pass\n    return 'no'",
    "endless": "def add(a, b):\n    while True: pass",
    "does not compile": "def add(a, b) return a",
    "nothing": "",
    "wrong": "def add(a, b): return a - b",
    "remembers": "calls = []\ndef add(a, b):\n    calls.append(1)\n    return calls",
    "a string of it": "def add(a, b): return str(a + b)",
    "returns all numbers": "def add(a, b): return range(100)",
    "deep": "def add(a, b):\n    x = []\n    for _ in range(10 ** 5): x = [x]\n    return x",
    "huge": "def add(a, b): return 'x' * (1 << 29)",
}  # fmt: skip


@pytest.fixture(scope="module")
def shares():
    """Of all programs, a few at a time."""

    async def main():
        sandbox = Sandbox(require_isolation=False, num=2, timeout_s=10.0)
        jobs = {("honest", name): statements_passed(sandbox, *case) for name, case in HONEST.items()}
        quick = Sandbox(require_isolation=False, num=2, timeout_s=3.0)
        jobs |= {("cheat", name): statements_passed(quick, program, CHEATED) for name, program in CHEATS.items()}
        return dict(zip(jobs, await asyncio.gather(*jobs.values()), strict=True))

    return asyncio.run(main())


@pytest.mark.parametrize("name", HONEST)
def test_a_right_program_passes_all_tests_however_it_is_written(shares, name):
    assert shares["honest", name] == 1.0


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_does_not_add_passes_none(shares, name):
    if name == "looks for processes" and not_isolated_because():
        pytest.skip("a program that is not isolated sees the judge's process")
    assert shares["cheat", name] == 0.0


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```bash\npip install x\n```\nThen:\n```python\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\n```\nIt prints:\n```\n5\n```", "a = 1\n"),
        ("```python\na = 1\n```\n```text\nb = 2\n```", "a = 1\n"),
        ("```python\na = 1\n```\n```output\n5\n```", "a = 1\n"),
        ("```Python\na = 1\n```", "a = 1\n"),
        ("```py\na = 1\n```", "a = 1\n"),
        ("```python3\na = 1\n```", "a = 1\n"),
        ('```python title="x.py"\na = 1\n```', "a = 1\n"),
        ("```{.python}\na = 1\n```", "a = 1\n"),
        ("~~~python\na = 1\n~~~", "a = 1\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("1. First\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
        ("```python\na = 1\nb = 2", "a = 1\nb = 2"),
        ("```python\na = 1\n```\n```\nb = 2\n```", "b = 2\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\r\na = 1\r\n```", "a = 1\r\n"),
        ("```python\r\na = 1\r\n```\r\nIt prints:\r\n```\r\n5\r\n```\r\n", "a = 1\r\n"),
        ("a = 1", "a = 1"),
        ("so `a = 1` it is\n```python\nb = 2\n```", "b = 2\n"),
        ("```python\na = 1\n```\n```javascript\nlet a\n```", "a = 1\n"),
        ("```python\n```", ""),
    ],
)
def test_the_program_of_a_reply_is_its_last_block_of_python(reply, code):
    assert code_of(reply) == code


def outputs(program, pairs, **settings):
    return asyncio.run(outputs_equal(Sandbox(**settings), program, pairs))


def test_output_is_compared_whole():
    assert outputs("for i in range(20_000): print(i)", [("", "\n".join(map(str, range(20_000))))]) == 1.0
    assert (
        outputs("for i in range(20_000): print(i if i != 19_999 else 0)", [("", "\n".join(map(str, range(20_000))))])
        == 0.0
    )


def test_an_expected_output_that_cannot_be_read_is_said():
    with pytest.raises(ValueError, match=f"the sandbox reads {OUTPUT_BYTES} bytes"):
        outputs("print(1)", [("", "x" * (OUTPUT_BYTES + 1))])


def test_a_program_may_put_anything_where_its_output_was():
    """What it prints counts, and nobody waits for what it put there."""
    program = "import os\nfor n in ('out', 'err', 'in', 'isolated', 'code.py'):\n    p = os.path.join('..', n)\n    if os.path.exists(p): os.remove(p)\n    os.mkfifo(p)\nprint(7)"
    assert outputs(program, [("", "7")], timeout_s=20.0) == 1.0
