# SPDX-License-Identifier: Apache-2.0
"""Sockets that lose packets at random: the kernel drops them before they come in, so no proxy is needed."""

import ctypes
import socket
import struct

from dlcp.transport import Endpoint

SO_ATTACH_FILTER = 26
RANDOM_NUMBER = 0xFFFFF000 + 56
"""SKF_AD_RANDOM of linux/filter.h."""


def lose_packets(sock, share):
    """Let a socket lose a share of all that comes; with UDP_SEGMENT a burst counts as one."""
    instructions = [
        (0x20, 0, 0, RANDOM_NUMBER),  # load
        (0x25, 1, 0, 0xFFFFFFFF - int(share * 0xFFFFFFFF)),  # if greater, drop
        (0x06, 0, 0, 0xFFFFFFFF),  # accept
        (0x06, 0, 0, 0),  # drop
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(instructions), ctypes.addressof(code)))


def lossy_endpoints(share):
    """Return what takes the place of ``Endpoint.__init__``, so that all of its sockets lose packets."""
    original = Endpoint.__init__

    def begin(endpoint, rank, sock, *arguments, **named):
        lose_packets(sock, share)
        original(endpoint, rank, sock, *arguments, **named)
        for further in endpoint._further:
            lose_packets(further, share)

    return begin
