import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "pages"))


@pytest.mark.parametrize("page", ["layout", "settings"])
def test_a_page_tells_what_the_code_says_now(page: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").read_text() == SCRIPT[page](), "run scripts/pages"


def test_a_python_without_packages_is_enough(tmp_path: Path) -> None:
    for name in ("scripts", "spmd_rl"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "docs").mkdir()
    subprocess.run([sys.executable, "-I", "-S", tmp_path / "scripts" / "pages"], check=True)
    for page in ("layout", "settings"):
        assert (tmp_path / "docs" / f"{page}.md").read_text() == (ROOT / "docs" / f"{page}.md").read_text()


def test_the_licence_that_the_package_names_comes_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (file,) = project["license-files"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / file).read_text()
