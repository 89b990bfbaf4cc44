# SPDX-License-Identifier: Apache-2.0
"""Many packets at once through a program's ingress and egress, on either back end."""

import numpy as np


def ingress(program, packets, lengths, ports, now_us):
    """Run ingress on rows of packets, edited in place; return egress ports, priorities and carry, a row for each."""
    columns = [_column(values, len(packets)) for values in (lengths, ports, now_us)]
    if program.backend == "numba":
        return program.machine.ingress_batch(packets, *columns)
    found = []
    for row, length, port, now in zip(packets, *(column.tolist() for column in columns), strict=True):
        packet = bytearray(row[:length])
        found.append(program.ingress(packet, port, now))
        row[:length] = packet
    out, priorities, carry = zip(*found, strict=True)
    return np.array(out), np.array(priorities), np.array(carry, np.int64)


def egress(program, packets, lengths, carry, *arguments):
    """Run egress on rows of packets, edited in place, with arguments as `Program.egress`; return the bytes to send."""
    columns = [_column(values, len(packets)) for values in (lengths, *arguments)]
    if program.backend == "numba":
        return program.machine.egress_batch(packets, columns[0], np.ascontiguousarray(carry), *columns[1:])
    sent = []
    for row, kept, length, *values in zip(
        packets, carry.tolist(), *(column.tolist() for column in columns), strict=True
    ):
        packet = bytearray(row[:length])
        sent.append(program.egress(packet, kept, *values))
        row[:length] = packet
    return np.array(sent)


def _column(values, count):
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.shape == (count,):
        return np.ascontiguousarray(values)  # a copy would cost a benchmark a tenth of its time
    return np.array(np.broadcast_to(np.asarray(values, np.int64), count))
