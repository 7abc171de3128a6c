"""Which vLLM is taken."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from spmd_rl.engine.vllm import BELOW, OLDEST, TORCH, check_installed, check_version


@pytest.mark.parametrize("version", ["0.27.1", "0.33.0", "0.33.0rc1", "1.0.0"])
def test_other_versions_are_refused_by_name(version):
    with pytest.raises(ValueError, match=f"vllm {version} is not supported"):
        check_version(version, "2.13.0")


@pytest.mark.parametrize("torch_version", ["2.12.1", "2.14.0+cpu", "3.13.0"])
def test_vllm_is_refused_on_a_torch_that_it_was_not_built_for(torch_version):
    with pytest.raises(ValueError, match=rf"vllm 0.32.0 needs torch 2.13, not {re.escape(torch_version)} \(pip"):
        check_version("0.32.0", torch_version)


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0", "0.32.1+cpu"])
@pytest.mark.parametrize("torch_version", ["2.13.0", "2.13.1+cu130"])
def test_known_versions_are_taken(version, torch_version):
    check_version(version, torch_version)


@pytest.mark.parametrize("extra", ["torch", "vllm"])
def test_what_the_extra_installs_is_what_is_taken(extra):
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (pins,) = [pin for pin in tomllib.loads(text)["project"]["optional-dependencies"]["vllm"] if pin.startswith(extra)]
    versions = {"torch": f"=={TORCH[0]}.{TORCH[1]}.*", "vllm": f">={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"}
    assert pins == extra + versions[extra]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_user_is_told_what_to_install():
    with pytest.raises(ValueError, match=r"pip install 'spmd_rl\[vllm\]'"):
        check_installed()
