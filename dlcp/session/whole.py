# SPDX-License-Identifier: Apache-2.0
"""An array that all ranks are to have as one of them has it: sent whole, down a binomial tree."""

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlcp.collectives.message_numbers import broadcast_number
from dlcp.collectives.shards import binomial_tree
from dlcp.tags import plain_tags
from dlcp.transport import RELIABLE, DeadlineError, Endpoint, MessageKey, ReceiveRequest, SendRequest

PART_BYTES: Final = 1 << 24
"""Longer arrays go in messages of this size: what comes before somebody waits for it is held. Chosen by us."""


def broadcast(endpoint: Endpoint, size: int, step: int, data: NDArray[np.uint8], root: int, deadline_s: float) -> None:
    """Write the root's ``data`` into that of all ranks; done when this rank has it, and those who get it from this one.

    Parameters
    ----------
    endpoint, size
        This rank's endpoint, and how many ranks there are.
    step
        A step in which nothing else is sent.
    data
        Shape (m,); of one length on all ranks.
    deadline_s
        How long each message may take.

    Raises
    ------
    ValueError
        The array has more parts than messages of a step can be numbered for; the message says what to do.
    TransportError
        A rank did not answer, or not in time; the message names it.
    """
    parent, children = binomial_tree(endpoint.rank, root, size)
    label = f"broadcast of rank {root}"
    parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
    if parts:
        broadcast_number(len(parts) - 1, max(0, (size - 1).bit_length() - 1), size)  # refused before anything is sent
    arriving = []
    if parent is not None:
        for index, part in enumerate(parts):
            key = MessageKey(step, broadcast_number(index, parent.hop, size))
            arriving.append(endpoint.receive(ReceiveRequest(parent.rank, key, len(part), RELIABLE, label, into=part)))
    sending = []
    for index, part in enumerate(parts):
        if parent is not None:
            _wait(arriving[index], step, f"rank {parent.rank}", label, deadline_s)
        tags = plain_tags(-(-len(part) // endpoint.options.payload_bytes))
        for child in children:
            key = MessageKey(step, broadcast_number(index, child.hop, size))
            request = SendRequest(child.rank, key, memoryview(part.data), tags, RELIABLE, label)
            sending.append((child.rank, endpoint.send(request)))
    for receiver, sent in sending:
        _wait(sent, step, f"rank {receiver}", label, deadline_s)


def _wait(message: "Future[Any]", step: int, whom: str, label: str, deadline_s: float) -> None:
    try:
        message.result(deadline_s)
    except FutureTimeoutError:
        raise DeadlineError(f"step {step}: {label}: no answer from {whom} in {deadline_s:g} s") from None
