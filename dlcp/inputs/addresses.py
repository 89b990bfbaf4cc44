# SPDX-License-Identifier: Apache-2.0
"""Addresses as people write and read them: ``HOST:PORT``, with an IPv6 address in brackets, as in ``[::1]:29500``."""

import ipaddress
import re
from typing import Final

from dlcp.inputs.error_text import short

Address = tuple[str, int]
"""A host, numeric or by name and without brackets, and a port."""
_PORTS: Final = 1 << 16
_FORM: Final = re.compile(r"(?:\[(?P<six>[^\]]*)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]*))?")


def parse_address(text: str, default_port: int | None = None, *, least_port: int = 0) -> Address:
    """Return host and port of ``HOST:PORT`` or ``[IPV6]:PORT``; with a ``default_port``, the port may be missing.

    Raises
    ------
    ValueError
        The text is no such address, or the port is not in ``least_port``..65535.
    """
    form = _FORM.fullmatch(text)
    if form is None and _is_ipv6(text):
        raise ValueError(f"expected host:port, got {short(text)}: put an IPv6 address in brackets, as in [::1]:29500")
    if form is None or (form["six"] is not None and not _is_ipv6(form["six"])):
        raise ValueError(f"expected host:port, got {short(text)}")
    host = form["host"] or str(ipaddress.IPv6Address(form["six"]))
    port = form["port"]
    if not port and default_port is None:
        raise ValueError(f"expected host:port, got {short(text)}, which has no port")
    # Check the length first: Python refuses to convert thousands of digits, with an error that does not help users.
    if port and (len(port) > len(str(_PORTS)) or not least_port <= int(port) < _PORTS):
        raise ValueError(f"expected host:port, got {short(text)}: ports are {least_port} to {_PORTS - 1}")
    return host, int(port) if port else default_port or 0


def parse_listening(text: str, default: tuple[str, int | None]) -> Address:
    """Return where to listen: ``HOST:PORT``, ``PORT``, ``:PORT`` or ``HOST``; what is missing is that of ``default``.

    Raises
    ------
    ValueError
        The text is none of these, or has no port although there is no default.
    """
    port = text.removeprefix(":")
    return parse_address(f"{format_host(default[0])}:{port}" if port.isdecimal() else text, default[1])


def format_address(address: Address) -> str:
    """Return ``HOST:PORT``, as :func:`parse_address` reads it; a socket's own address may have further items."""
    host, port = address[:2]
    return f"{format_host(host)}:{port}"


def format_host(host: str) -> str:
    """Return a host as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
