# SPDX-License-Identifier: Apache-2.0
"""Who may write: of all connected controllers, the one with the highest election id.

The rules are those of the specification, section 5. They differ from BMv2's in one thing: when the primary leaves,
nobody becomes primary automatically; a backup that wants to says so again, with an id no lower than any before it.
"""

from collections.abc import Iterable
from typing import Final, Protocol

from finsy.proto import p4r, rpc_code

from dlcp.switch.p4runtime.messages import Refused

CONNECTIONS_MAX: Final = 16
"""Controllers at a time, as in BMv2."""


class ControllerStream(Protocol):
    """The stream of one controller."""

    def send(self, response: p4r.StreamMessageResponse) -> None:
        """Queue a message, without blocking."""


class Arbiter:
    """The controllers of one device, all in the default role. Not thread-safe."""

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self._election_ids: dict[ControllerStream, int | None] = {}
        """Of every connected controller; None for one that never wants to be primary."""
        self._primary: ControllerStream | None = None
        self._announced = False
        """Whether the primary may write, because the writes of the one before it have ended."""
        self._highest: int | None = None
        """The highest election id so far."""

    def may_write(self, election_id: p4r.Uint128) -> bool:
        """Whether a request with this election id comes from the primary."""
        if self._primary is None or not self._announced:
            return False
        return self._election_ids.get(self._primary) == _number(election_id)

    def is_primary(self, stream: ControllerStream) -> bool:
        """Whether a stream is the primary's."""
        return stream is self._primary and self._announced

    def knows(self, stream: ControllerStream) -> bool:
        """Whether a stream has taken part in the arbitration."""
        return stream in self._election_ids

    def update(self, stream: ControllerStream, request: p4r.MasterArbitrationUpdate) -> bool:
        """Note what a controller wants.

        Returns
        -------
        Whether the primary has changed. Then nobody may write until :meth:`announce`, which the caller calls when the
        writes of the primary before have ended.

        Raises
        ------
        Refused
            The stream must end.
        """
        self._check(stream, request)
        election_id = _number(request.election_id) if request.HasField("election_id") else None
        for other, known in self._election_ids.items():
            if other is not stream and election_id is not None and known == election_id:
                raise Refused(f"election id {election_id} is already used by another controller")
        if stream not in self._election_ids and len(self._election_ids) >= CONNECTIONS_MAX:
            raise Refused(f"{CONNECTIONS_MAX} controllers are connected already", rpc_code.RESOURCE_EXHAUSTED)
        self._election_ids[stream] = election_id
        wins = election_id is not None and (self._highest is None or election_id >= self._highest)
        if wins:
            self._highest = election_id
            if not self.is_primary(stream):
                self._primary, self._announced = stream, False
                self._notify([other for other in self._election_ids if other is not stream])
                return True
            self._notify(self._election_ids)
        elif stream is self._primary:
            self._primary = None
            self._notify(self._election_ids)
        else:
            self._notify([stream])
        return False

    def announce(self, stream: ControllerStream) -> None:
        """Notify a new primary that it is; do nothing if another has become primary in the meantime."""
        if stream is self._primary and not self._announced:
            self._announced = True
            self._notify([stream])

    def leave(self, stream: ControllerStream) -> None:
        """Forget a controller whose stream has ended."""
        self._election_ids.pop(stream, None)
        if stream is self._primary:
            self._primary = None
            self._notify(self._election_ids)

    def _check(self, stream: ControllerStream, request: p4r.MasterArbitrationUpdate) -> None:
        first = stream not in self._election_ids
        if request.device_id != self.device_id:
            code = rpc_code.NOT_FOUND if first else rpc_code.FAILED_PRECONDITION
            raise Refused(f"this is device {self.device_id}, not {request.device_id}", code)
        if request.role.id or request.role.name or request.role.HasField("config"):
            code = rpc_code.UNIMPLEMENTED if first else rpc_code.FAILED_PRECONDITION
            raise Refused("there is the default role only", code)
        if request.HasField("election_id") and not _number(request.election_id):
            raise Refused("an election id is above 0")

    def _notify(self, streams: Iterable[ControllerStream]) -> None:
        for stream in streams:
            response = p4r.StreamMessageResponse()
            message = response.arbitration
            message.device_id = self.device_id
            if self._highest is not None:
                message.election_id.high, message.election_id.low = divmod(self._highest, 1 << 64)
            if stream is self._primary:
                message.status.code, message.status.message = rpc_code.OK, "you are primary"
            elif self._primary is not None:
                message.status.code, message.status.message = rpc_code.ALREADY_EXISTS, "another controller is primary"
            else:
                message.status.code, message.status.message = rpc_code.NOT_FOUND, "no controller is primary"
            stream.send(response)


def _number(election_id: p4r.Uint128) -> int:
    return election_id.high << 64 | election_id.low
