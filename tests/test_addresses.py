# SPDX-License-Identifier: Apache-2.0
"""Addresses as people write them, and as C and the kernel have them, in both families."""

import socket

import pytest

from dlcp.host import ip
from dlcp.host.ip import FAMILIES, IPV4, IPV6, family_of, is_link_local, is_loopback, resolve
from dlcp.inputs.addresses import format_address, format_host, parse_address, parse_listening
from dlcp.session.options import Options


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:9000", ("10.0.0.1", 9000)),
        ("host", ("host", 7)),
        ("host:", ("host", 7)),
        ("host:0", ("host", 0)),
        ("[::1]:29500", ("::1", 29500)),
        ("[FD00:0::0001]", ("fd00::1", 7)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_addresses_are_host_and_port(text, address):
    assert parse_address(text, 7) == address
    assert parse_address(format_address(address)) == address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("host:http", "expected host:port, got 'host:http'"),
        (":80", "expected host:port, got ':80'"),
        ("host", "got 'host', which has no port"),
        ("[::1]:65536", "ports are 0 to 65535"),
        ("::1", r"put an IPv6 address in brackets, as in \[::1\]:29500"),
        ("fd00::1:29500", "expected host:port, got 'fd00::1:29500'"),
        ("[10.0.0.1]:5", "expected host:port, got"),
        ("[::1]5", "expected host:port, got"),
        ("[::1", "expected host:port, got"),
        ("h\u00b2:\u00b2", "expected host:port, got"),
    ],
)
def test_what_is_no_address_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_address(text)


def test_options_take_addresses_of_both_families():
    assert Options(bind="[fd00::1]:0", collective="server:[fd00::2]:5000").server == "[fd00::2]:5000"
    with pytest.raises(ValueError, match="DLCP_BIND: expected host:port, got '::1': put an IPv6 address in brackets"):
        Options.from_environment({"DLCP_BIND": "::1"})


def test_sockets_show_addresses_with_further_items():
    assert format_address(("::1", 5, 0, 0)) == "[::1]:5"
    assert (format_host("::1"), format_host("host")) == ("[::1]", "host")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_packed_address_is_the_kernels(family):
    assert family_of(family.loopback) is family_of(family.any_address) is family
    packed = family.packed(family.loopback, 0x1234)
    assert len(packed) == {IPV4: 16, IPV6: 28}[family]
    assert int.from_bytes(packed[2:4], "big") == 0x1234
    assert socket.inet_pton(family.number, family.loopback) in packed
    assert is_loopback(family.loopback)


def test_what_leads_elsewhere_is_no_loopback():
    assert is_loopback("127.0.1.1")
    assert not any(map(is_loopback, ("10.0.0.1", "fd00::1", "fe80::1%eth0")))
    assert [is_link_local(host) for host in ("fe80::1%lo", "fd00::1", "169.254.0.1")] == [True, False, False]


@pytest.fixture
def names(monkeypatch):
    """Host names, in the place of the resolver's."""
    known = {"six": ["fd00::6"], "four": ["10.0.0.4"], "both": ["fd00::1", "10.0.0.1"], "link": ["fe80::1%lo"]}

    def getaddrinfo(host, port, family=0, *_):
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        found = [(family_of(each).number, 2, 17, "", (each, 0)) for each in known[host]]
        found = [each for each in found if family in (0, each[0])]
        if not found:
            raise socket.gaierror(socket.EAI_ADDRFAMILY, "Address family for hostname not supported")
        return found

    monkeypatch.setattr(ip.socket, "getaddrinfo", getaddrinfo)


def test_names_have_addresses_in_the_resolvers_order(names):
    assert (resolve("both"), resolve("both", IPV4), resolve("six")) == (
        ["fd00::1", "10.0.0.1"],
        ["10.0.0.1"],
        ["fd00::6"],
    )
    with pytest.raises(OSError, match="four has no IPv6 address"):
        resolve("four", IPV6)
    with pytest.raises(OSError, match="Name or service not known"):
        resolve("nowhere")
    with pytest.raises(OSError, match="link is link-local, so it is valid on one link only"):
        resolve("link")


def test_what_cannot_be_a_name_is_told_so():
    with pytest.raises(OSError, match=r"'a\.\.b' is not a host name"):
        resolve("a..b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9559", ("127.0.0.1", 9559)),
        (":9559", ("127.0.0.1", 9559)),
        ("10.0.0.1", ("10.0.0.1", 9559)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("localhost:1", ("localhost", 1)),
        ("[::1]:50", ("::1", 50)),
        ("[::1]", ("::1", 9559)),
    ],
)
def test_where_to_listen(text, expected):
    assert parse_listening(text, ("127.0.0.1", 9559)) == expected


@pytest.mark.parametrize("text", ["host:port", "host:65536", "1:2:3", "70000"])
def test_where_nobody_can_listen(text):
    with pytest.raises(ValueError, match="expected host:port, got "):
        parse_listening(text, ("127.0.0.1", 9559))
