"""What holds for all of the source: functions end within 80 lines, mypy is silenced nowhere without a reason."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 80


def test_no_function_has_more_than_80_lines() -> None:
    long = set()
    for path in sorted((ROOT / "spmd_rl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= MOST_LINES:
                    long.add(f"{path.relative_to(ROOT)} {node.name}")
    assert not long


def test_mypy_is_silenced_only_with_a_reason() -> None:
    ignores = re.compile(r"#\s*type:\s*ignore.*")
    for path in sorted((ROOT / "spmd_rl").rglob("*.py")):
        for ignored in ignores.findall(path.read_text()):
            assert re.fullmatch(r"# type: ignore\[[a-z-]+\]  # \S.*", ignored), f"{path}: {ignored}"


def test_mypy_leaves_no_module_out() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] and settings["files"] == ["spmd_rl", "examples"] and "exclude" not in settings
    for override in settings["overrides"]:
        assert not any(module.startswith("spmd_rl") for module in override["module"])
