"""Folders import downward only; the half that decides knows no torch; groups are made in one place."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import spmd_rl
from tests.floors import FLOORS

PACKAGE = Path(__file__).parents[2] / "spmd_rl"
TORCH_FREE = (
    "cli",
    "config",
    "commands.simulate",
    "envs",
    "metrics",
    "objective.advantages",
    "orchestrator",
    "rewards",
)


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "spmd_rl":
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
    return found


def test_a_folder_imports_only_from_lower_floors() -> None:
    floor = {name: number for number, (_, folders) in enumerate(FLOORS) for name in folders}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own != "__init__":
            wrong += [
                f"{path.relative_to(PACKAGE)} imports {n}" for n in _imports(path) - {own} if floor[n] >= floor[own]
            ]
    assert not wrong


def test_the_root_holds_the_entry_the_command_line_and_the_words() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "cli.py", "types.py"}


def test_groups_are_made_in_one_place() -> None:
    """One made later would not meet: an engine's ranks count groups of their own."""
    makes = [path.name for path in PACKAGE.rglob("*.py") if "new_group(" in path.read_text()]
    assert makes == ["world.py"]


def test_only_the_wiring_imports_all_parts_of_the_orchestrator() -> None:
    known_to_all = {"answers", "background", "ending", "ledger", "policy"}
    parts = {path.stem for path in (PACKAGE / "orchestrator").glob("*.py")} - known_to_all
    for path in (PACKAGE / "orchestrator").glob("*.py"):
        if path.stem in ("orchestrator", "stepping", "train_path", "state"):
            continue
        siblings = {name for name in parts if f"from spmd_rl.orchestrator.{name} " in path.read_text()}
        assert len(siblings) <= 2, f"{path.name} imports {siblings}"


def test_the_half_that_decides_imports_no_torch() -> None:
    names = []
    for name in TORCH_FREE:
        folder = PACKAGE / name.replace(".", "/")
        files = sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
        names += [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in files]
    lines = "; ".join(f"import spmd_rl.{name.removesuffix('.__init__')}" for name in names)
    subprocess.run([sys.executable, "-c", f"{lines}; import sys; assert 'torch' not in sys.modules"], check=True)


def test_a_module_that_has_moved_is_named_with_its_new_place() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^spmd_rl\.judge is now spmd_rl\.rewards$"):
        __import__("spmd_rl.judge")
    for place in spmd_rl._MOVED.values():
        assert (PACKAGE / place.replace(".", "/")).is_dir() or (PACKAGE / f"{place.replace('.', '/')}.py").is_file()
