# SPDX-License-Identifier: Apache-2.0
"""Frames as a network engineer writes them down: layers with fields, lengths and checksums filled in.

``ethernet() ipv4(src=10.0.0.9, dst=10.0.0.3) udp() dlcp(job=7, queue=5) 0102``: each layer is a name with the fields
that differ from the defaults below; hexadecimal digits are bytes as they are. A field that says what follows (Ethernet
type, protocol, lengths) and a checksum are right unless given. ``cut(33)`` at the end keeps the first 33 bytes.
"""

import ipaddress
import re
import struct
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from dlcp.wire import FIELD_BITS, UDP_PORT_BASE, VERSION

Fields = Mapping[str, int]

_PART: Final = re.compile(r"\s*(?:(?P<layer>[a-z]\w*)\s*\((?P<fields>[^()]*)\)|(?P<digits>[0-9a-fA-F*]+))")
_MAC: Final = re.compile(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}")
_DEFAULTS: Final[dict[str, dict[str, int | None]]] = {
    "ethernet": {"dst": 0x0200000000FF, "src": 0x020000000001, "type": None},
    "ipv4": {
        "src": None,
        "dst": None,
        "ttl": 64,
        "dscp": 0,
        "ecn": 0,
        "id": 0,
        "fragment": 0,
        "protocol": None,
        "version": 4,
        "ihl": 5,
        "length": None,
        "checksum": None,
    },
    "udp": {"src": UDP_PORT_BASE, "dst": UDP_PORT_BASE, "length": None, "checksum": None},
    "tcp": {"src": 40000, "dst": 80, "sequence": 0},
    "dlcp": {**dict.fromkeys(FIELD_BITS, 0), "version": VERSION, "type": 1},
}
_PROTOCOLS: Final = {"udp": 17, "tcp": 6}
_WIDTHS: Final[dict[str, dict[str, int]]] = {
    "ethernet": {"dst": 48, "src": 48, "type": 16},
    "ipv4": {
        "src": 32,
        "dst": 32,
        "ttl": 8,
        "dscp": 6,
        "ecn": 2,
        "id": 16,
        "fragment": 16,
        "protocol": 8,
        "version": 4,
        "ihl": 4,
        "length": 16,
        "checksum": 16,
    },
    "udp": {"src": 16, "dst": 16, "length": 16, "checksum": 16},
    "tcp": {"src": 16, "dst": 16, "sequence": 32},
    "dlcp": FIELD_BITS,
}


class FrameError(ValueError):
    """A frame that is not written as it should be; the message says which part."""


class Pattern(NamedTuple):
    """Bytes with a mask: where the mask has a zero bit, anything will do."""

    value: bytes
    mask: bytes

    def matches(self, data: bytes, *, longer: bool = False) -> bool:
        """Say whether ``data`` is one of the packets meant; ``longer`` lets more bytes follow."""
        if len(data) < len(self.value) or (len(data) > len(self.value) and not longer):
            return False
        return all((left ^ right) & bits == 0 for left, right, bits in zip(data, self.value, self.mask, strict=False))


class _Layer(NamedTuple):
    name: str
    """Empty for bytes as they are."""
    fields: dict[str, int | None]
    digits: str = ""


def checksum(data: bytes) -> int:
    """Return the Internet checksum of bytes (RFC 1071)."""
    padded = data + bytes(len(data) % 2)
    total: int = sum(struct.unpack(f">{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def frame(text: str) -> Pattern:
    """Return the bytes of a frame that was written down, and the mask of what ``*`` leaves open.

    Raises
    ------
    FrameError
        An unknown layer or field, a value that does not fit, or half a byte.
    """
    layers, cut = _layers(text)
    value, mask = b"", b""
    for index in range(len(layers) - 1, -1, -1):
        layer = layers[index]
        if layer.name:
            following = layers[index + 1].name if index + 1 < len(layers) else ""
            before = layers[index - 1] if index else None
            made = _BUILDERS[layer.name](layer.fields, value, following, before)
            value, mask = made + value, b"\xff" * len(made) + mask
        else:
            digits = layer.digits
            value = bytes.fromhex(digits.replace("*", "0")) + value
            mask = bytes.fromhex(re.sub(r"[^*]", "f", digits).replace("*", "0")) + mask
    return Pattern(value[:cut], mask[:cut])


def _layers(text: str) -> tuple[list[_Layer], int | None]:
    layers: list[_Layer] = []
    position, cut = 0, None
    text = text.strip()
    while position < len(text):
        part = _PART.match(text, position)
        if part is None or cut is not None:
            raise FrameError(f"cannot read a frame from {text[position : position + 30]!r} on: layers, then bytes")
        position = part.end()
        name, digits = part["layer"], part["digits"]
        if digits:
            if layers and not layers[-1].name:
                digits = layers.pop().digits + digits
            layers.append(_Layer("", {}, digits))
        elif name == "cut":
            cut = _number("cut", part["fields"].strip())
        else:
            layers.append(_Layer(name, _fields(name, part["fields"])))
    odd = [layer.digits for layer in layers if len(layer.digits) % 2]
    if odd:
        raise FrameError(f"{odd[0]!r} ends with half a byte")
    return layers, cut


def _fields(layer: str, text: str) -> dict[str, int | None]:
    if layer not in _DEFAULTS:
        raise FrameError(f"no layer {layer!r}; there are {', '.join(_DEFAULTS)}, and cut")
    fields = dict(_DEFAULTS[layer])
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, given = (side.strip() for side in item.partition("="))
        if name not in fields:
            raise FrameError(f"{layer} has no field {name!r}; it has {', '.join(fields)}")
        value = _number(f"{layer}.{name}", given)
        if not 0 <= value < 1 << _WIDTHS[layer][name]:
            raise FrameError(f"{layer}.{name} has {_WIDTHS[layer][name]} bits; {given} does not fit")
        fields[name] = value
    return fields


def _number(what: str, text: str) -> int:
    try:
        if _MAC.fullmatch(text):
            return int(text.replace(":", ""), 16)
        return int(ipaddress.IPv4Address(text)) if text.count(".") == 3 else int(text, 0)
    except ValueError:
        raise FrameError(f"{what} is {text!r}: no number, IPv4 address or Ethernet address") from None


def _ethernet(fields: Mapping[str, int | None], payload: bytes, following: str, before: _Layer | None) -> bytes:
    kind = fields["type"]
    if kind is None:
        kind = 0x0800 if following == "ipv4" else 0x88B5
    return _bits(fields["dst"], 6) + _bits(fields["src"], 6) + _bits(kind, 2)


def _ipv4(fields: Mapping[str, int | None], payload: bytes, following: str, before: _Layer | None) -> bytes:
    given = {name: value or 0 for name, value in fields.items()}
    if fields["src"] is None or fields["dst"] is None:
        raise FrameError("ipv4 needs src and dst")
    protocol = _PROTOCOLS.get(following, 253) if fields["protocol"] is None else given["protocol"]
    length = 20 + len(payload) if fields["length"] is None else given["length"]
    # Options, if any, are the bytes that follow; the checksum is over all of the header.
    options = payload[: max(0, 4 * given["ihl"] - 20)]
    head = struct.pack(
        ">BBHHHBBHII",
        given["version"] << 4 | given["ihl"],
        given["dscp"] << 2 | given["ecn"],
        length,
        given["id"],
        given["fragment"],
        given["ttl"],
        protocol,
        0,
        given["src"],
        given["dst"],
    )
    right = checksum(head + options) if fields["checksum"] is None else given["checksum"]
    return head[:10] + _bits(right, 2) + head[12:]


def _udp(fields: Mapping[str, int | None], payload: bytes, following: str, before: _Layer | None) -> bytes:
    size = 8 + len(payload)
    head = _bits(fields["src"], 2) + _bits(fields["dst"], 2)
    head += _bits(size if fields["length"] is None else fields["length"], 2)
    right = fields["checksum"]
    if right is None:
        if before is None or before.name != "ipv4":
            raise FrameError("udp needs ipv4 before it, or a checksum")
        pseudo = _bits(before.fields["src"], 4) + _bits(before.fields["dst"], 4) + struct.pack(">BBH", 0, 17, size)
        right = checksum(pseudo + head + b"\0\0" + payload) or 0xFFFF
    return head + _bits(right, 2)


def _tcp(fields: Mapping[str, int | None], payload: bytes, following: str, before: _Layer | None) -> bytes:
    start = _bits(fields["src"], 2) + _bits(fields["dst"], 2) + _bits(fields["sequence"], 4)
    return start + struct.pack(">IHHHH", 0, 5 << 12 | 0x10, 65535, 0, 0)


def _dlcp(fields: Mapping[str, int | None], payload: bytes, following: str, before: _Layer | None) -> bytes:
    value = 0
    for name, bits in FIELD_BITS.items():
        value = value << bits | (fields[name] or 0)
    return value.to_bytes(sum(FIELD_BITS.values()) // 8, "big")


def _bits(value: int | None, size: int) -> bytes:
    return (value or 0).to_bytes(size, "big")


_Builder = Callable[[Mapping[str, "int | None"], bytes, str, "_Layer | None"], bytes]
_BUILDERS: Final[dict[str, _Builder]] = {
    "ethernet": _ethernet,
    "ipv4": _ipv4,
    "udp": _udp,
    "tcp": _tcp,
    "dlcp": _dlcp,
}
