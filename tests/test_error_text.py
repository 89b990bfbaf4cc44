# SPDX-License-Identifier: Apache-2.0
"""Errors are reported in words, also those that have none."""

import socket
import subprocess

import pytest

from dlcp.inputs.configuration import host_and_port
from dlcp.inputs.error_text import describe, ipv4_only
from dlcp.session.addresses import own_place
from dlcp.session.options import Options


def test_an_error_without_a_message_is_told_by_type_and_place():
    with pytest.raises(AssertionError) as raised:
        raise AssertionError
    assert "AssertionError() in test_an_error_without_a_message" in describe(raised.value)
    assert f"{__file__}, line " in describe(raised.value)


def test_an_error_that_nobody_raised_is_told_by_type():
    assert describe(KeyError()) == "KeyError()"


def test_a_message_is_told_as_it_is():
    assert describe(OSError(2, "no such file")) == "[Errno 2] no such file"
    assert describe(subprocess.TimeoutExpired("ls", 3)) == "Command 'ls' timed out after 3 seconds"


@pytest.mark.parametrize("text", ["::1", "[::1]", "[fe80::1]:29500", "2001:db8::7"])
def test_an_address_of_ipv6_is_named_as_unsupported(text):
    assert ipv4_only(text).startswith(f"DLCP supports only IPv4, not {text}: use an IPv4 address")
    with pytest.raises(ValueError, match="DLCP supports only IPv4"):
        host_and_port(text, 5)
    with pytest.raises(ValueError, match="DLCP_BIND: DLCP supports only IPv4"):
        Options.from_environment({"DLCP_BIND": text})


def test_a_name_with_ipv6_addresses_only_is_unsupported(monkeypatch):
    found = {"six": [socket.AF_INET6], "both": [socket.AF_INET6, socket.AF_INET], "four": [socket.AF_INET]}

    def resolve(host, port):
        if host not in found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(family, None, 0, "", ()) for family in found[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert "six has only IPv6 addresses" in ipv4_only("six")
    assert ipv4_only("both") == ipv4_only("four") == ipv4_only("nowhere") == ""


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_route_to_an_ipv6_host_says_so(host):
    with pytest.raises(OSError, match="DLCP supports only IPv4"):
        own_place(Options(), host)
