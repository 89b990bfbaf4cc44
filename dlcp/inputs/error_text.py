# SPDX-License-Identifier: Apache-2.0
"""Parts of error messages: the text of another error, suggestions for a mistyped name, and addresses of IPv6."""

import difflib
import ipaddress
import socket
import traceback
from collections.abc import Iterable


def describe(error: BaseException) -> str:
    """Return an error's message; if that is empty, its type and the line that raised it."""
    text = str(error)
    if text.strip():
        return text
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return repr(error)
    last = frames[-1]
    return f"{error!r} in {last.name} ({last.filename}, line {last.lineno})"


def closest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known name most similar to ``name``; empty if none is similar."""
    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with up to three similar names, else the list of all known names."""
    names = list(known)
    short = {item.rpartition(".")[2]: item for item in names}
    found = [item for item in names if item in difflib.get_close_matches(name, names, 3)]
    found += [short[item] for item in difflib.get_close_matches(name.rpartition(".")[2], short, 3)]
    found = list(dict.fromkeys(found))[:3]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return f"; it has {', '.join(names)}" if names else "; it has none"


def is_ipv6(text: str) -> bool:
    """Return whether a text is an IPv6 address, as in ``::1``, ``[::1]`` or ``[::1]:29500``."""
    try:
        ipaddress.IPv6Address(text[1:].partition("]")[0] if text.startswith("[") else text)
    except ValueError:
        return False
    return True


def ipv4_only(host: str) -> str:
    """Return that DLCP supports only IPv4, if a host has no other address than of IPv6; else ``""``."""
    advice = "use an IPv4 address, or a name that has one"
    if is_ipv6(host):
        return f"DLCP supports only IPv4, not {host}: {advice}"
    try:
        families = {found[0] for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return ""
    if socket.AF_INET in families or socket.AF_INET6 not in families:
        return ""
    return f"DLCP supports only IPv4, and {host} has only IPv6 addresses: {advice}"
