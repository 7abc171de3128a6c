import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "readme"))


def test_the_readme_tells_the_files_of_now() -> None:
    said = (ROOT / "README.md").read_text()
    assert SCRIPT["written"](said) == said, "run scripts/readme"


def test_the_page_of_settings_tells_the_settings_of_now() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == SCRIPT["settings"](), "run scripts/readme"


def test_a_python_without_packages_is_enough(tmp_path: Path) -> None:
    for name in ("README.md", "scripts", "spmd_rl"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (tmp_path / "docs").mkdir()
    subprocess.run([sys.executable, "-I", "-S", tmp_path / "scripts" / "readme"], check=True)
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()
    assert (tmp_path / "docs" / "settings.md").read_text() == (ROOT / "docs" / "settings.md").read_text()
