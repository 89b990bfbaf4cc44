// SPDX-License-Identifier: Apache-2.0

parser DlcpParser(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHERTYPE_VLAN: parse_vlan;
            ETHERTYPE_IPV4: parse_ipv4;
            ETHERTYPE_IPV6: parse_ipv6;
            default: accept;
        }
    }

    // A packet with two tags is ordinary traffic.
    state parse_vlan {
        packet.extract(hdr.vlan);
        transition select(hdr.vlan.ether_type) {
            ETHERTYPE_IPV4: parse_ipv4;
            ETHERTYPE_IPV6: parse_ipv6;
            default: accept;
        }
    }

    // In packets with IP options and in fragments, ports are elsewhere or absent.
    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.frag_offset, hdr.ipv4.protocol) {
            (4, 5, 0, PROTOCOL_UDP): parse_udp;
            (4, 5, 0, PROTOCOL_TCP): parse_tcp;
            default: accept;
        }
    }

    // Behind an extension header, ports are elsewhere, and in fragments absent.
    state parse_ipv6 {
        packet.extract(hdr.ipv6);
        transition select(hdr.ipv6.version, hdr.ipv6.next_header) {
            (6, PROTOCOL_UDP): parse_udp;
            (6, PROTOCOL_TCP): parse_tcp;
            default: accept;
        }
    }

    state parse_tcp {
        packet.extract(hdr.ports);
        meta.src_port = hdr.ports.src_port;
        meta.dst_port = hdr.ports.dst_port;
        transition accept;
    }

    state parse_udp {
        packet.extract(hdr.ports);
        packet.extract(hdr.udp);
        meta.src_port = hdr.ports.src_port;
        meta.dst_port = hdr.ports.dst_port;
        // A datagram too short for the DLCP header is ordinary traffic, not a truncated packet.
        transition select(hdr.ports.dst_port, hdr.udp.length_) {
            (DLCP_PORT_BASE &&& DLCP_PORT_MASK, 0 .. DLCP_UDP_LENGTH_MIN - 1): accept;
            (DLCP_PORT_BASE &&& DLCP_PORT_MASK, _): parse_dlcp;
            default: accept;
        }
    }

    state parse_dlcp {
        packet.extract(hdr.dlcp);
        transition accept;
    }
}
