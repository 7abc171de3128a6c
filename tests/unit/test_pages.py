import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from spmd_rl import config, envs, rewards

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "pages"))


@pytest.mark.parametrize("page", ["layout", "settings", "models", "api"])
def test_a_page_tells_what_the_code_says_now(page: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").read_text() == SCRIPT[page](), "run scripts/pages"


def test_a_python_without_packages_is_enough(tmp_path: Path) -> None:
    for name in ("scripts", "spmd_rl"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("docs/models.json", "tests/floors.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, "-I", "-S", tmp_path / "scripts" / "pages"], check=True)
    for page in ("layout", "settings", "models", "api"):
        assert (tmp_path / "docs" / f"{page}.md").read_text() == (ROOT / "docs" / f"{page}.md").read_text()


@pytest.mark.parametrize("package", [envs, rewards])
def test_the_page_of_what_users_import_has_every_public_name(package: ModuleType) -> None:
    _, _, rest = (ROOT / "docs" / "api.md").read_text().partition(f"\n## {package.__name__}\n")
    assert set(re.findall(r"^### (\w+)$", rest.partition("\n## ")[0], re.M)) == set(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_examples_in_the_docs_import_nothing_but_public_names() -> None:
    blocks = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    imports = re.findall(r"^(?:from|import) (spmd_rl\S*)(?: import (.*))?$", "\n".join(blocks), re.M)
    assert imports
    for module, names in imports:
        public = {"spmd_rl.envs": envs, "spmd_rl.rewards": rewards}[module].__all__
        assert set(names.split(", ")) <= set(public)


def test_the_licence_that_the_package_names_comes_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (file,) = project["license-files"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / file).read_text()


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
SUFFIXES = {"py", "md", "toml", "json", "jsonl", "png", "safetensors"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_files_and_settings_that_a_page_names_are_there(page: Path) -> None:
    text, sections = page.read_text().partition("\n## Refused\n")[0], config.sections()  # in other libraries' words
    for link, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, anchor
    for section, name in re.findall(rf"\b({'|'.join(sections)})\.([a-z_]+)\b", text):
        assert name in sections[section].__dataclass_fields__ or name in SUFFIXES, f"{section}.{name}"
    for path in re.findall(r"\b(?:configs|launch|scripts|docs)/[\w.-]*\w", text):
        assert (ROOT / path).exists() or path.startswith("configs/start_"), path
