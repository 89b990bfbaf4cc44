# SPDX-License-Identifier: Apache-2.0
"""Parses frames written as layers with fields, and fills in lengths and checksums.

``ethernet() ipv4(src=10.0.0.9, dst=10.0.0.3) udp() dlcp(job=7, queue=5) 0102``: each layer is a name with the fields
that differ from the defaults below; hexadecimal digits are raw bytes. Ethernet type, protocol, lengths and checksums
are correct unless given. ``cut(33)`` at the end keeps the first 33 bytes.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from dlcp.switch.entries import parse_number
from dlcp.switch.executor.hashes import csum16, pack
from dlcp.switch.executor.model import EntryError
from dlcp.wire import FIELD_BITS, UDP_PORT_BASE, VERSION

_PART: Final = re.compile(r"\s*(?:(?P<layer>[a-z]\w*)\s*\((?P<fields>[^()]*)\)|(?P<digits>[0-9a-fA-F*]+))")
_LAYERS: Final[dict[str, dict[str, tuple[int, int | None]]]] = {
    "ethernet": {"dst": (48, 0x0200000000FF), "src": (48, 0x020000000001), "type": (16, None)},
    "ipv4": {
        "version": (4, 4),
        "ihl": (4, 5),
        "dscp": (6, 0),
        "ecn": (2, 0),
        "length": (16, None),
        "id": (16, 0),
        "fragment": (16, 0),
        "ttl": (8, 64),
        "protocol": (8, None),
        "checksum": (16, None),
        "src": (32, None),
        "dst": (32, None),
    },
    "udp": {"src": (16, UDP_PORT_BASE), "dst": (16, UDP_PORT_BASE), "length": (16, None), "checksum": (16, None)},
    "tcp": {
        "src": (16, 40000),
        "dst": (16, 80),
        "sequence": (32, 0),
        "acknowledgement": (32, 0),
        "flags": (16, 5 << 12 | 0x10),
        "window": (16, 65535),
        "checksum": (16, 0),
        "urgent": (16, 0),
    },
    "dlcp": {name: (bits, {"version": VERSION, "type": 1}.get(name, 0)) for name, bits in FIELD_BITS.items()},
}
"""Fields of each layer in wire order: (bits, default); the default is None for a field that is computed or required."""
_ETHER_TYPES: Final = {"ipv4": 0x0800}
_OTHER_TYPE: Final = 0x88B5
"""Reserved for experiments (IEEE 802)."""
_PROTOCOLS: Final = {"udp": 17, "tcp": 6}
_OTHER_PROTOCOL: Final = 253
"""Reserved for experiments (RFC 3692)."""


class FrameError(ValueError):
    """A frame has a syntax error; the message says where."""


class Pattern(NamedTuple):
    """Bytes with a mask; a zero bit in the mask matches anything."""

    value: bytes
    mask: bytes

    def matches(self, data: bytes, *, longer: bool = False) -> bool:
        """Whether ``data`` matches; ``longer`` allows trailing bytes."""
        if len(data) < len(self.value) or (len(data) > len(self.value) and not longer):
            return False
        return all((left ^ right) & bits == 0 for left, right, bits in zip(data, self.value, self.mask, strict=False))


class _Layer(NamedTuple):
    name: str
    """Empty for raw bytes."""
    fields: dict[str, int | None]
    digits: str = ""


def frame(text: str) -> Pattern:
    """Parse a frame into its bytes and the mask of its ``*`` digits.

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
            made = _header(layer, value, following, before)
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
            raise FrameError(
                f"cannot parse {text[position : position + 30]!r}; write LAYER(FIELD=VALUE, ...) or hexadecimal digits"
            )
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
    if layer not in _LAYERS:
        raise FrameError(f"no layer {layer!r}; choose from {', '.join(_LAYERS)} and cut")
    known = _LAYERS[layer]
    fields = {name: default for name, (_, default) in known.items()}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, given = (side.strip() for side in item.partition("="))
        if name not in known:
            raise FrameError(f"{layer} has no field {name!r}; it has {', '.join(known)}")
        value, (bits, _) = _number(f"{layer}.{name}", given), known[name]
        if not 0 <= value < 1 << bits:
            raise FrameError(f"{layer}.{name} has {bits} bits; {given} does not fit")
        fields[name] = value
    return fields


def _number(what: str, text: str) -> int:
    try:
        return parse_number(text)
    except EntryError as error:
        raise FrameError(f"{what}: {error}") from None


def _header(layer: _Layer, payload: bytes, following: str, before: _Layer | None) -> bytes:
    """Return the bytes of a layer; fields not given are computed from its neighbours."""
    follows: dict[str, int] = {}
    if layer.name == "ethernet":
        follows["type"] = _ETHER_TYPES.get(following, _OTHER_TYPE)
    elif layer.name == "ipv4":
        if layer.fields["src"] is None or layer.fields["dst"] is None:
            raise FrameError("ipv4 needs src and dst")
        follows = {"length": 20 + len(payload), "protocol": _PROTOCOLS.get(following, _OTHER_PROTOCOL)}
        # Options, if any, are the following bytes; the checksum covers the whole header.
        options = payload[: max(0, 4 * (layer.fields["ihl"] or 0) - 20)]
        follows["checksum"] = csum16(_packed(layer, follows) + options)
    elif layer.name == "udp":
        size = 8 + len(payload)
        follows["length"] = size
        if layer.fields["checksum"] is None:
            if before is None or before.name != "ipv4":
                raise FrameError("udp needs ipv4 before it, or a checksum")
            addresses = [before.fields["src"] or 0, before.fields["dst"] or 0]
            pseudo = pack([*addresses, _PROTOCOLS["udp"], size], [32, 32, 16, 16])
            follows["checksum"] = csum16(pseudo + _packed(layer, follows) + payload) or 0xFFFF
    return _packed(layer, follows)


def _packed(layer: _Layer, follows: Mapping[str, int]) -> bytes:
    values = [follows.get(name, 0) if value is None else value for name, value in layer.fields.items()]
    return pack(values, [bits for bits, _ in _LAYERS[layer.name].values()])
