"""Everything here needs vLLM; without it each test is skipped and says why."""

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm/" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's own are not ours to mend
            if find_spec("vllm") is None:
                item.add_marker(
                    pytest.mark.skip(reason="vLLM is not installed: scripts/test-vllm makes a place for it")
                )
