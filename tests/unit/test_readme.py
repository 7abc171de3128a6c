import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_tells_the_files_and_settings_of_now() -> None:
    said = (ROOT / "README.md").read_text()
    assert runpy.run_path(str(ROOT / "scripts" / "readme"))["written"](said) == said, "run scripts/readme"
