# SPDX-License-Identifier: Apache-2.0
"""The containers of the compose file, as network namespaces with their host names, train together."""

import re

import pytest

from tests.cluster.nodes import Nodes, finished
from tests.cluster.test_examples import COMPOSE, documents, programs
from tests.integrations.test_integrations import SLOW

pytestmark = [pytest.mark.timeout(220), SLOW]


def test_the_containers_train_together(tmp_path):
    """One batch per epoch."""
    pytest.importorskip("sklearn")
    services = documents(COMPOSE)[0]["services"].values()
    addresses = {service["hostname"]: f"10.73.0.{number}" for number, service in enumerate(services, 1)}
    names = "".join(f"{address} {name}\n" for name, address in addresses.items())
    with Nodes(tmp_path, {name: {"eth0": address} for name, address in addresses.items()}, lambda _: names) as nodes:
        variables = {"PATH": programs(tmp_path)["PATH"], "DLCP_SECRET": "s" * 64}
        words = {service["hostname"]: ["dlcp", *service["command"], "--dry-run"] for service in services}
        told = finished([nodes.popen(name, command, **variables) for name, command in words.items()])
    for text in told:
        assert re.search(r"DLCP  \w+, 3 steps, 1 of 2 ranks, those of this machine", text), text
        assert "through sockets" in text
        assert "fallback           none, " in text
