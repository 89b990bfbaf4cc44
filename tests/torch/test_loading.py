# SPDX-License-Identifier: Apache-2.0
"""``import dlcp.torch`` loads the modules that a DDP hook needs, and others on demand."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

MODULES = 58
COUNT = "print(sum(name == 'dlcp' or name.startswith('dlcp.') for name in sys.modules))"


def printed(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_hook_loads_few_modules():
    assert int(printed(f"import sys, dlcp.torch; {COUNT}")) <= MODULES


@pytest.mark.parametrize("package", ["dlcp.torch", "dlcp.session", "dlcp.collectives", "dlcp.compress"])
def test_every_name_is_there_when_it_is_asked_for(package):
    names = printed(f"import {package} as it; print(*[getattr(it, name) for name in it.__all__])")
    assert names
    with pytest.raises(subprocess.CalledProcessError):
        printed(f"from {package} import nonsense")


def test_the_backend_is_known_without_being_loaded():
    code = (
        "import sys, dlcp.torch, torch.distributed as dist\n"
        "assert 'DLCP' in dist.Backend._plugins and 'dlcp.torch.backend' not in sys.modules"
    )
    assert printed(code) == ""
