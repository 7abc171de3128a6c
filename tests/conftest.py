"""What holds for all tests: the same random examples each time, however fast the machine is and whatever its kernel."""

import pytest
from hypothesis import HealthCheck, settings

from spmd_rl.envs.code import Code
from spmd_rl.envs.python_tool import PythonTool
from spmd_rl.processes.sandbox import Sandbox, not_isolated_because

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _code_also_runs_where_it_cannot_be_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run in containers too; what isolation promises is tested in test_sandbox.py, where it can be had."""
    if not_isolated_because():
        for runs_code in (Sandbox, Code, PythonTool):
            monkeypatch.setitem(runs_code.__init__.__kwdefaults__, "require_isolation", False)
