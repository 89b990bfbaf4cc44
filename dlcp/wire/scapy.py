# SPDX-License-Identifier: Apache-2.0
"""The DLCP header as a Scapy layer, bound to the UDP destination ports. Needs Scapy (``pip install 'dlcp[capture]'``).

``from dlcp.wire.scapy import DLCP`` is enough: afterwards ``rdpcap("capture.pcap")[0][DLCP].step`` works, and so does
``IP() / UDP() / DLCP(job=3, queue=6)``.
"""

from typing import Any, ClassVar

from scapy.fields import AnyField, BitEnumField, BitField
from scapy.layers.inet import UDP
from scapy.packet import Packet, Raw, bind_bottom_up, bind_layers

from dlcp.wire.header import FIELD_BITS, HEADER_BYTES, UDP_PORT_BASE, UDP_PORT_COUNT, VERSION, PacketType

_DEFAULTS = {"version": VERSION, "type": PacketType.DATA}
_NAMES = {"type": {int(kind): kind.name for kind in PacketType}}


def _field(name: str, bits: int) -> AnyField:
    """Return the Scapy field of one header field: ``bits`` wide, with names for its values if there are any."""
    default = int(_DEFAULTS.get(name, 0))
    if name in _NAMES:
        return BitEnumField(name, default, bits, _NAMES[name])
    return BitField(name, default, bits)


class DLCP(Packet):
    """One DLCP header; field names and widths are those of ``dlcp.wire.FIELD_BITS``."""

    name = "DLCP"
    fields_desc: ClassVar[list[AnyField]] = [_field(name, bits) for name, bits in FIELD_BITS.items()]

    @classmethod
    def dispatch_hook(cls, _pkt: bytes | None = None, *args: Any, **kwargs: Any) -> type[Packet]:
        """Return the layer that parses ``_pkt``: this one, or ``Raw`` if it has no header of this version."""
        if _pkt is not None and (len(_pkt) < HEADER_BYTES or _pkt[0] >> 4 != VERSION):
            return Raw
        return cls

    def mysummary(self) -> str:
        """Return one line: the type, the packet's message, and its tags."""
        return self.sprintf(
            "DLCP %type% job %job% step %step% message %message% sender %sender% packet %index%/%count% "
            "layer %layer% queue %queue% class %drop_class%"
        )


for _port in range(UDP_PORT_BASE, UDP_PORT_BASE + UDP_PORT_COUNT):
    bind_bottom_up(UDP, DLCP, dport=_port)
bind_layers(UDP, DLCP, dport=UDP_PORT_BASE)
