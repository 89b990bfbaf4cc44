# SPDX-License-Identifier: Apache-2.0
"""What is answered to a request that cannot be done: a canonical code and a sentence."""

from typing import Final

from finsy.proto import rpc_code

from dlcp.switch.errors import (
    CellError,
    ConstantError,
    DuplicateError,
    EntryError,
    FullError,
    InUseError,
    MissingError,
)

OK: Final[int] = rpc_code.OK
UNKNOWN: Final[int] = rpc_code.UNKNOWN
INVALID_ARGUMENT: Final[int] = rpc_code.INVALID_ARGUMENT
DEADLINE_EXCEEDED: Final[int] = rpc_code.DEADLINE_EXCEEDED
NOT_FOUND: Final[int] = rpc_code.NOT_FOUND
ALREADY_EXISTS: Final[int] = rpc_code.ALREADY_EXISTS
PERMISSION_DENIED: Final[int] = rpc_code.PERMISSION_DENIED
RESOURCE_EXHAUSTED: Final[int] = rpc_code.RESOURCE_EXHAUSTED
FAILED_PRECONDITION: Final[int] = rpc_code.FAILED_PRECONDITION
OUT_OF_RANGE: Final[int] = rpc_code.OUT_OF_RANGE
UNIMPLEMENTED: Final[int] = rpc_code.UNIMPLEMENTED
UNAVAILABLE: Final[int] = rpc_code.UNAVAILABLE

_CODES: Final = (
    (DuplicateError, ALREADY_EXISTS),
    (MissingError, NOT_FOUND),
    (FullError, RESOURCE_EXHAUSTED),
    (InUseError, FAILED_PRECONDITION),
    (ConstantError, PERMISSION_DENIED),
    (CellError, OUT_OF_RANGE),
)


class Refused(Exception):  # noqa: N818 - the name says what it is
    """A request that is not done.

    Attributes
    ----------
    code
        Canonical code of google.rpc.
    message
        What is wrong, where, and what to do.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @classmethod
    def of(cls, error: EntryError) -> "Refused":
        """Return what to answer when the program refuses an entry."""
        code = next((code for kind, code in _CODES if isinstance(error, kind)), INVALID_ARGUMENT)
        return cls(code, str(error))
