import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "readme"))


def test_the_readme_tells_the_files_of_now() -> None:
    said = (ROOT / "README.md").read_text()
    assert SCRIPT["written"](said) == said, "run scripts/readme"


def test_the_page_of_settings_tells_the_settings_of_now() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == SCRIPT["settings"](), "run scripts/readme"
