# SPDX-License-Identifier: Apache-2.0
"""The job's secret: where it comes from, and the proofs, seals and tokens that ranks derive from it.

All of them are HMAC-SHA256. ``docs/security.md`` says what they protect against, and what they do not.
"""

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path
from typing import Final, Protocol, cast

from dlcp.inputs.configuration import SECRET_VARIABLE
from dlcp.session.options import Options

log = logging.getLogger("dlcp")

SECRET_BYTES_MIN: Final = 16
"""Minimum length of a secret: 128 bits, if it is random. An attacker who has recorded a proof can try out shorter ones
offline."""
PROOF_BYTES: Final = 32
REFUSALS_LOGGED: Final = 10
NO_VALUE: Final = " "
"""A value that no rank writes. Comparing with it and setting it reads a key without waiting, and changes nothing."""
DISTURBED: Final = "another process writes into the job's store without knowing the job's secret"


def configured_secret(options: Options) -> bytes | None:
    """Return the job's secret as the user set it: from ``secret_file``, or ``DLCP_SECRET``; None if neither is set.

    Raises
    ------
    OSError
        The file cannot be read, or is readable by every user of the machine.
    ValueError
        The secret is shorter than :data:`SECRET_BYTES_MIN`.
    """
    if options.secret_file:
        path = Path(options.secret_file)
        try:
            if path.stat().st_mode & 0o007:
                raise PermissionError(errno.EPERM, "every user can access it; chmod 600")
            found, where = path.read_bytes().strip(), str(path)
        except OSError as error:
            raise OSError(error.errno, f"no job's secret at {path} ({error.strerror})") from None
    else:
        found, where = os.fsencode(os.environ.get(SECRET_VARIABLE, "")), SECRET_VARIABLE
        if not found:
            return None
    if _random_bytes(found) < SECRET_BYTES_MIN:
        raise ValueError(
            f"{where} has {len(found)} bytes; a secret needs at least {SECRET_BYTES_MIN}: openssl rand -hex 32 > FILE"
        )
    return found


def job_secret(options: Options) -> bytes:
    """Return the job's secret as the user set it, or by default the per-user key.

    The key is a file that only the user can read, created on first use. Ranks on several hosts share the key if the
    hosts share the user's home directory; otherwise they need a secret.

    Raises
    ------
    OSError, ValueError
        See :func:`configured_secret`; or the key cannot be read or created. The message says what to do.
    """
    found = configured_secret(options)
    if found is not None:
        return found
    path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dlcp" / "key"
    try:
        return _read_key(path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"no key for the job's store at {path} ({error.strerror}): set DLCP_SECRET_FILE, the same on all ranks",
        ) from None


def _read_key(path: Path) -> bytes:
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(f"key.{secrets.token_hex(8)}")
        part.touch(mode=0o600, exist_ok=False)
        try:
            part.write_bytes(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):  # another rank was faster; its key counts
                os.link(part, path)
        finally:
            part.unlink()
    if path.stat().st_mode & 0o077:
        raise PermissionError(errno.EPERM, "other users can access it; chmod 600")
    found = path.read_bytes()
    if _random_bytes(found) < SECRET_BYTES_MIN:
        raise OSError(
            errno.EINVAL,
            f"it has {_random_bytes(found)} random bytes, and needs {SECRET_BYTES_MIN}; remove it to create another",
        )
    return found


def _random_bytes(found: bytes) -> int:
    """Return a secret's length without zeros and blanks at its ends.

    A full disk, or a crash while the file was written, can leave only these.
    """
    return len(found.strip(b"\0 \t\r\n"))


def proof(secret: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of some parts under the secret, 32 bytes: proof that its maker knows the secret."""
    # Lengths are included, so that no two different lists of parts yield the same message.
    return hmac.digest(secret, b"".join(len(part).to_bytes(8, "big") + part for part in parts), hashlib.sha256)


def session_token(key: bytes) -> int:
    """Return a session's token: 64 bits derived from the session's key, which they do not reveal."""
    return int.from_bytes(proof(key, b"token")[:8], "big") | 1


class KeyValueStore(Protocol):
    """The store through which ranks agree: one of PyTorch's, or :class:`dlcp.session.store.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that has one."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all these keys have a value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write ``desired`` if the value is ``expected``; ``""`` means no value.

        Returns
        -------
        The key's value afterwards.
        """


class SealedStore:
    """Seals the values in a store that anyone can write to, such as PyTorch's, with a proof of the secret.

    A value without a valid proof is refused, that is, treated as absent: one from a stranger, or a replay from another
    session. Values are not hidden from readers. No call waits for a value that a stranger has deleted.

    Parameters
    ----------
    store
        The underlying store.
    secret
        The job's secret.

    Attributes
    ----------
    refused
        The keys whose values were refused, each once.
    """

    def __init__(self, store: KeyValueStore, secret: bytes) -> None:
        self.refused: list[str] = []
        self._store, self._keys = store, [secret]
        self._genuine: dict[str, bytes] = {}
        self._own: dict[str, str] = {}
        self._earlier: set[str] = set()

    def begin_session(self, key: bytes) -> None:
        """Seal with the session's key from now on.

        Of the values sealed with the secret itself, only those stay valid whose topics this rank wrote before: the
        random values by which the ranks announced themselves. Any other could be a replay from another session.
        """
        self._keys.insert(0, key)
        self._earlier = {own.partition("/")[0] for own in self._own}

    def set(self, key: str, value: str, /) -> None:
        """Write a value with its seal."""
        # This rank trusts its own value over the store's. So its random value always enters the session's key, which
        # is therefore new, and replays from other sessions fail.
        self._genuine[key] = value.encode()
        self._own[key] = self._sealed(key, value)
        self._store.set(key, self._own[key])

    def get(self, key: str, /) -> bytes:
        """Return the value of a key for which :meth:`check` was true."""
        return self._genuine[key]

    def check(self, keys: list[str], /) -> bool:
        """Return whether all these keys have a value with a valid proof."""
        unknown = [key for key in keys if key not in self._genuine]
        if unknown and not self._store.check(unknown):
            return False
        # Not get(): PyTorch's would wait if the key has been deleted meanwhile.
        return all(self._opened(key, self._store.compare_set(key, NO_VALUE, NO_VALUE)) is not None for key in unknown)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write ``desired`` if there is no value with a valid proof; return the valid value afterwards.

        If a stranger overwrites it twice meanwhile, return :data:`DISTURBED`.
        """
        sealed = self._sealed(key, desired)
        for _ in range(2):
            found = self._store.compare_set(key, expected, sealed)
            value = self._opened(key, found)
            if value is not None:
                return value
            # PyTorch's stores also accept bytes, despite their annotations; a stranger's value need not be text.
            expected = cast(str, found)
        return DISTURBED.encode()

    def restore(self) -> None:
        """Write this rank's values again where a stranger has altered or deleted them."""
        for key, sealed in list(self._own.items()):
            found = self._store.compare_set(key, "", sealed)
            # Only this rank writes its keys with a rank number, so any other value there is a stranger's.
            if self._opened(key, found) is None or ("/" in key and found != sealed.encode()):
                self._store.set(key, sealed)

    def _sealed(self, key: str, value: str) -> str:
        return self._seal(self._keys[0], key, value.encode()) + value

    @staticmethod
    def _seal(key: bytes, name: str, value: bytes) -> str:
        return proof(key, b"value", name.encode(), value).hex()

    def _opened(self, key: str, found: bytes) -> bytes | None:
        """Verify what was found at a key; return the value without its seal, or None if it has no valid proof."""
        seal, value = found[: 2 * PROOF_BYTES], found[2 * PROOF_BYTES :]
        keys = self._keys if key.partition("/")[0] in self._earlier else self._keys[:1]
        if any(hmac.compare_digest(seal, self._seal(own, key, value).encode()) for own in keys):
            return self._genuine.setdefault(key, bytes(value))
        if key not in self.refused:
            self.refused.append(key)
            if len(self.refused) <= REFUSALS_LOGGED:
                log.warning("DLCP refuses %s in the job's store: it has no valid proof of the job's secret", key)
        return None
