# SPDX-License-Identifier: Apache-2.0
"""Who may write: of all controllers that are connected, the one with the highest election id.

The rules are those of the specification, section 5. They differ from BMv2's in one thing: when the primary leaves,
nobody becomes primary by itself; a backup that wants to says so again, with an id no lower than any there has been.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from finsy.proto import p4r

from dlcp.switch.p4runtime.messages import (
    ALREADY_EXISTS,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    NOT_FOUND,
    OK,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    Refused,
)

CONNECTIONS_MAX: Final = 16
"""Controllers at a time, as in BMv2."""


class ControllerStream(Protocol):
    """One controller's stream."""

    def send(self, response: p4r.StreamMessageResponse) -> None:
        """Send a message some time soon."""


ListenerT = TypeVar("ListenerT", bound=ControllerStream)


@dataclass(slots=True)
class _Controller:
    election_id: int | None
    """None for one that never wants to be primary."""


class Arbiter(Generic[ListenerT]):
    """The controllers of one device, all in the default role. Not for several threads at once."""

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self._controllers: dict[ListenerT, _Controller] = {}
        self._primary: ListenerT | None = None
        self._announced = False
        """Whether the primary may write: writes of the one before it have ended."""
        self._highest: int | None = None
        """The highest election id there has been."""

    def may_write(self, election_id: p4r.Uint128) -> bool:
        """Whether a request with this election id comes from the primary."""
        primary = self._controllers.get(self._primary) if self._primary is not None else None
        return primary is not None and self._announced and primary.election_id == _number(election_id)

    def is_primary(self, listener: ListenerT) -> bool:
        """Whether a stream is the primary's."""
        return listener is self._primary and self._announced

    def knows(self, listener: ListenerT) -> bool:
        """Whether a stream has taken part in the arbitration."""
        return listener in self._controllers

    def update(self, listener: ListenerT, request: p4r.MasterArbitrationUpdate) -> bool:
        """Take note of what a controller wants.

        Returns
        -------
        Whether the primary has changed, so that nobody may write until :meth:`announce` was called; call it when
        writes of the primary before have ended.

        Raises
        ------
        Refused
            The stream must end.
        """
        controller = self._controllers.get(listener)
        self._check(request, controller)
        election_id = _number(request.election_id) if request.HasField("election_id") else None
        for other, its in self._controllers.items():
            if other is not listener and election_id is not None and its.election_id == election_id:
                raise Refused(INVALID_ARGUMENT, f"election id {election_id} is already used by another controller")
        if controller is None:
            if len(self._controllers) >= CONNECTIONS_MAX:
                raise Refused(RESOURCE_EXHAUSTED, f"{CONNECTIONS_MAX} controllers are connected already")
            controller = self._controllers[listener] = _Controller(election_id)
        controller.election_id = election_id
        wins = election_id is not None and (self._highest is None or election_id >= self._highest)
        if wins:
            self._highest = election_id
            if listener is not self._primary or not self._announced:
                self._primary, self._announced = listener, False
                self._tell([other for other in self._controllers if other is not listener])
                return True
            self._tell(self._controllers)
        elif listener is self._primary:
            self._primary = None
            self._tell(self._controllers)
        else:
            self._tell([listener])
        return False

    def announce(self, listener: ListenerT) -> None:
        """Tell a new primary that it is; nothing if another has taken its place in the meantime."""
        if listener is self._primary and not self._announced:
            self._announced = True
            self._tell([listener])

    def leave(self, listener: ListenerT) -> None:
        """Forget a controller whose stream has ended."""
        self._controllers.pop(listener, None)
        if listener is self._primary:
            self._primary = None
            self._tell(self._controllers)

    def _check(self, request: p4r.MasterArbitrationUpdate, controller: _Controller | None) -> None:
        if request.device_id != self.device_id:
            code = NOT_FOUND if controller is None else FAILED_PRECONDITION
            raise Refused(code, f"this is device {self.device_id}, not {request.device_id}")
        if request.role.id or request.role.name or request.role.HasField("config"):
            raise Refused(
                UNIMPLEMENTED if controller is None else FAILED_PRECONDITION, "there is the default role only"
            )
        if request.HasField("election_id") and not _number(request.election_id):
            raise Refused(INVALID_ARGUMENT, "an election id is above 0")

    def _tell(self, listeners: Iterable[ListenerT]) -> None:
        for listener in listeners:
            response = p4r.StreamMessageResponse()
            message = response.arbitration
            message.device_id = self.device_id
            if self._highest is not None:
                message.election_id.high, message.election_id.low = divmod(self._highest, 1 << 64)
            if listener is self._primary:
                message.status.code, message.status.message = OK, "you are primary"
            elif self._primary is not None:
                message.status.code, message.status.message = ALREADY_EXISTS, "another controller is primary"
            else:
                message.status.code, message.status.message = NOT_FOUND, "no controller is primary"
            listener.send(response)


def _number(election_id: p4r.Uint128) -> int:
    return election_id.high << 64 | election_id.low
