# SPDX-License-Identifier: Apache-2.0
"""The job's secret: where it comes from, and what ranks prove, seal and derive by it.

HMAC-SHA256 is all there is to it. ``docs/security.md`` says what that protects, against whom, and what it does not.
"""

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from dlcp.session.options import Options

if TYPE_CHECKING:
    from dlcp.session.joining import KeyValueStore

log = logging.getLogger("dlcp")

SECRET_VARIABLE: Final = "DLCP_SECRET"
SECRET_BYTES_MIN: Final = 16
"""Shorter ones are guessed too easily by who has recorded a proof. Chosen by us: 128 bits, if they are random."""
PROOF_BYTES: Final = 32
REFUSALS_LOGGED: Final = 10
NO_VALUE: Final = " "
"""Nothing that a rank writes: a store that is asked to replace it by itself tells what is there, and does not wait."""
DISTURBED: Final = "somebody who does not know the job's secret writes into the job's store"


def configured_secret(options: Options) -> bytes | None:
    """Return the secret that the user gave the job, in a file (``secret_file``) or as ``DLCP_SECRET``; None if none.

    Raises
    ------
    OSError
        The file cannot be read, or every user of the machine can.
    ValueError
        The secret is too short to be one.
    """
    if options.secret_file:
        path = Path(options.secret_file)
        try:
            if path.stat().st_mode & 0o007:
                raise PermissionError(errno.EPERM, "every user may read it; chmod 600")
            found, where = path.read_bytes().strip(), str(path)
        except OSError as error:
            raise OSError(error.errno, f"no job's secret at {path} ({error.strerror})") from None
    else:
        found, where = os.environ.get(SECRET_VARIABLE, "").encode(), SECRET_VARIABLE
        if not found:
            return None
    if _random_bytes(found) < SECRET_BYTES_MIN:
        raise ValueError(
            f"{where} has {len(found)} bytes, and a secret at least {SECRET_BYTES_MIN}: openssl rand -hex 32 > FILE"
        )
    return found


def job_secret(options: Options) -> bytes:
    """Return the secret that the user gave the job, or else the user's own key.

    The key is a file that only the user can read, made when it is first asked for. Ranks on several hosts share it
    where these share the user's home; elsewhere they need a secret.

    Raises
    ------
    OSError, ValueError
        See :func:`configured_secret`; or the key cannot be read or made. The message says what to do.
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
            f"no key for the job's store at {path} ({error.strerror}): set DLCP_SECRET_FILE, alike on all ranks",
        ) from None


def _read_key(path: Path) -> bytes:
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(f"key.{secrets.token_hex(8)}")
        part.touch(mode=0o600, exist_ok=False)
        part.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):  # another rank was faster, and its key is the one
            os.link(part, path)
        part.unlink()
    if path.stat().st_mode & 0o077:
        raise PermissionError(errno.EPERM, "others may read it; chmod 600")
    found = path.read_bytes()
    if _random_bytes(found) < SECRET_BYTES_MIN:
        raise OSError(
            errno.EINVAL,
            f"it has {_random_bytes(found)} random bytes, and needs {SECRET_BYTES_MIN}; remove it to have one made",
        )
    return found


def _random_bytes(found: bytes) -> int:
    """Return how many bytes of a secret may be random; a disk that was full, or a crash, leaves none or only zeros."""
    return len(found.strip(b"\0 \t\r\n"))


def proof(secret: bytes, *parts: bytes) -> bytes:
    """Return what only those who know the secret can make of some parts: HMAC-SHA256, 32 bytes."""
    # With their lengths, so that no two lists of parts read alike.
    return hmac.digest(secret, b"".join(len(part).to_bytes(8, "big") + part for part in parts), hashlib.sha256)


def session_token(key: bytes) -> int:
    """Return the token of a session: 64 bits that follow from its key, and tell nothing of it."""
    return int.from_bytes(proof(key, b"token")[:8], "big") | 1


class SealedStore:
    """A store in which values count only with proof of the secret: for one, as PyTorch's, that anybody may write to.

    A value without proof, a stranger's say, or one that was recorded in another session, is refused: it is as if it
    were not there. Values are not hidden from readers. Nothing here waits for a value that somebody has deleted.

    Parameters
    ----------
    store
        What holds the values.
    secret
        The job's secret.

    Attributes
    ----------
    refused
        The keys of refused values, each once.
    """

    def __init__(self, store: "KeyValueStore", secret: bytes) -> None:
        self.refused: list[str] = []
        self._store, self._keys = store, [secret]
        self._genuine: dict[str, bytes] = {}
        self._own: dict[str, str] = {}

    def begin_session(self, key: bytes) -> None:
        """Seal with the session's key from now on.

        What the ranks wrote before they had met still counts: that they are here, and what they then drew.
        """
        self._keys.insert(0, key)

    def set(self, key: str, value: str, /) -> None:
        """Write a value, sealed."""
        # What this rank has drawn counts, whatever the store says: so a session's key is new, and recordings are old.
        self._genuine[key] = value.encode()
        self._own[key] = self._sealed(key, value)
        self._store.set(key, self._own[key])

    def get(self, key: str, /) -> bytes:
        """Return a value that :meth:`check` has found."""
        return self._genuine[key]

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all these keys have a value with proof."""
        unknown = [key for key in keys if key not in self._genuine]
        if unknown and not self._store.check(unknown):
            return False
        # PyTorch's get() would wait for a key that is deleted by now.
        return all(self._opened(key, self._store.compare_set(key, NO_VALUE, NO_VALUE)) is not None for key in unknown)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write ``desired`` if there is no value with proof; return the one that is there then."""
        sealed = self._sealed(key, desired)
        for _ in range(2):
            found = self._store.compare_set(key, expected, sealed)
            value = self._opened(key, found)
            if value is not None:
                return value
            # PyTorch's stores take bytes, too, whatever their annotations say; a stranger's need not be text.
            expected = cast(str, found)
        return DISTURBED.encode()

    def restore(self) -> None:
        """Write again what this rank has written and somebody has altered or deleted."""
        for key, sealed in list(self._own.items()):
            found = self._store.compare_set(key, "", sealed)
            # A key with a rank's number is that rank's alone.
            if self._opened(key, found) is None or ("/" in key and found != sealed.encode()):
                self._store.set(key, sealed)

    def _sealed(self, key: str, value: str) -> str:
        return self._seal(self._keys[0], key, value.encode()) + value

    @staticmethod
    def _seal(key: bytes, name: str, value: bytes) -> str:
        return proof(key, b"value", name.encode(), value).hex()

    def _opened(self, key: str, found: bytes) -> bytes | None:
        """Return the value of what was found at a key, None if it has no proof."""
        seal, value = found[: 2 * PROOF_BYTES], found[2 * PROOF_BYTES :]
        if any(hmac.compare_digest(seal, self._seal(own, key, value).encode()) for own in self._keys):
            return self._genuine.setdefault(key, bytes(value))
        if key not in self.refused:
            self.refused.append(key)
            if len(self.refused) <= REFUSALS_LOGGED:
                log.warning("DLCP refuses %s in the job's store: it shows no knowledge of the job's secret", key)
        return None
