"""Which vLLM is taken."""

from importlib.util import find_spec

import pytest

from spmd_rl.engine.vllm import check_installed, check_version


@pytest.mark.parametrize("version", ["0.27.1", "0.33.0", "0.33.0rc1", "1.0.0"])
def test_other_versions_are_refused_by_name(version):
    with pytest.raises(ValueError, match=f"vllm {version} is not supported"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0", "0.32.1+cpu"])
def test_known_versions_are_taken(version):
    check_version(version)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_user_is_told_what_to_install():
    with pytest.raises(ValueError, match=r"pip install 'spmd_rl\[vllm\]'"):
        check_installed()
