# SPDX-License-Identifier: Apache-2.0
"""Errors between two ranks. Every message names the rank, the step and the layers concerned."""


class TransportError(RuntimeError):
    """A message cannot be delivered."""


class PeerSilentError(TransportError):
    """A rank has not answered for longer than allowed: its process or its path is dead."""


class DeadlineError(TransportError):
    """A rank answers, but a message is not complete within its deadline."""


class PeerHangsError(TransportError):
    """A rank answers but does not reach the point that others wait for: its script hangs or is much slower."""


class PeerAbortedError(TransportError):
    """A rank gave up, with a reason."""


class RankEndedError(PeerSilentError):
    """A rank's process has ended, or has left the group."""


class PeerLeftError(TransportError):
    """A rank has left normally while this one still waits for a message from it."""


class MessageMismatchError(TransportError):
    """Two ranks disagree about the size of a message."""


class BoundExceededError(TransportError):
    """More of a message was lost than its bound allows."""


def at_step(job: int, step: int) -> str:
    """Return the beginning of an error message about a step."""
    return f"job {job}, step {step}"
