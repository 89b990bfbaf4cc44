# SPDX-License-Identifier: Apache-2.0
"""Ranks with PyTorch need no gRPC. Without it, everything else names the extra to install."""

import subprocess
import sys

from dlcp.session.joining import Agreement, NotJoinedError, join
from dlcp.session.options import Options
from tests.group.group_ranks import on_ranks
from tests.group.test_secret import OpenStore

INSTALL = "meet over gRPC, which is missing: pip install 'dlcp[store]'"


def test_groups_without_pytorch_need_it():
    code = "import sys; sys.modules['grpc'] = None; import dlcp.torch; print('trains'); from dlcp.session import join"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "trains\n"
    assert done.stderr.endswith(f"ModuleNotFoundError: ranks without PyTorch, and parameter servers, {INSTALL}\n")


def test_ranks_with_a_parameter_server_continue_without_dlcp(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in ("store", "serving"):
        monkeypatch.delitem(sys.modules, f"dlcp.session.{name}", raising=False)
    store, options = OpenStore(), Options(collective="server:127.0.0.1:1", bind="127.0.0.1:0")

    def one(rank):
        try:
            return join(options, Agreement(store, rank, 2, 5.0), call="enable")
        except NotJoinedError as problem:
            return str(problem)

    why = f"rank 0: ranks without PyTorch, and parameter servers, {INSTALL}"
    assert on_ranks(2, one) == {0: why, 1: why}
