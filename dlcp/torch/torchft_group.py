# SPDX-License-Identifier: Apache-2.0
"""A process group for torchft (https://github.com/meta-pytorch/torchft): its replicas exchange over DLCP.

Use it where torchft takes ``ProcessGroupGloo()``::

    manager = torchft.Manager(pg=dlcp.torch.torchft_group.ProcessGroupDLCP(), ...)

torchft decides who takes part, and makes the group anew for every quorum: packets of an old one are refused. A
collective during which a replica dies raises an error, and torchft discards the step. To complete it instead, use
:class:`dlcp.torch.elastic.Elastic`.
"""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torchft.process_group import ProcessGroupWrapper

from dlcp.session.options import Options
from dlcp.torch.backend import create


class ProcessGroupDLCP(ProcessGroupWrapper):  # type: ignore[misc]  # torchft has no types
    """A group that can be made anew with other ranks (``configure``), and each time exchanges over DLCP.

    Parameters
    ----------
    timeout
        How long ranks wait for each other when it is made, and for a message.
    options
        By default ``Options()``; see :func:`dlcp.torch.backend.create`.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), options: Options | None = None) -> None:
        super().__init__(timeout)
        self._options = options

    def getBackendName(self) -> str:  # noqa: N802 - torchft's name
        """Return ``torchft-dlcp``."""
        return "torchft-dlcp"

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        given = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=world_size,
            group_id=f"torchft quorum {self._quorum_id}",
            timeout=self._timeout,
        )
        return create(given, self._options)
