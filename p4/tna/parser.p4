// SPDX-License-Identifier: Apache-2.0

parser DlcpParser(packet_in packet, out headers_t hdr, out metadata_t meta, out ingress_intrinsic_metadata_t ig) {
    Checksum() ipv4_checksum;
    Checksum() udp_checksum;

    state start {
        packet.extract(ig);
        // The compiler may place several fields in one container: an unwritten one would hold the value of another.
        meta.tagged = 0;
        meta.refused = 0;
        meta.is_control = 0;
        meta.queue = QUEUE_ORDINARY;
        meta.drop_class = CLASS_NEVER;
        meta.src_addr = 0;
        meta.dst_addr = 0;
        meta.protocol = 0;
        meta.src_port = 0;
        meta.dst_port = 0;
        meta.entropy = 0;
        meta.may_drop = 0;
        meta.droppable = 0;
        meta.eg_port = 0;
        meta.counted = 0;
        meta.event = 0;
        meta.event_port = 0;
        meta.checksum_error = false;
        meta.cleared = false;
        // The driver's data for each port precedes the first header.
        meta.ig = port_metadata_unpack<port_metadata_t>(packet);
        transition select(ig.ingress_port) {
            RECIRCULATION_PORT &&& RECIRCULATION_PORT_MASK: parse_report;
            default: parse_ethernet;
        }
    }

    // Only our own egress sends to these ports, so reports cannot be forged.
    state parse_report {
        packet.extract(hdr.report);
        transition accept;
    }

    state parse_ethernet {
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
        ipv4_checksum.add(hdr.ipv4);
        meta.checksum_error = ipv4_checksum.verify();
        meta.src_addr = hdr.ipv4.src_addr;
        meta.dst_addr = hdr.ipv4.dst_addr;
        meta.protocol = hdr.ipv4.protocol;
        transition select(hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.frag_offset, hdr.ipv4.protocol) {
            (4, 5, 0, PROTOCOL_UDP): parse_udp;
            (4, 5, 0, PROTOCOL_TCP): parse_tcp;
            default: accept;
        }
    }

    // Behind an extension header, ports are elsewhere, and in fragments absent.
    state parse_ipv6 {
        packet.extract(hdr.ipv6);
        meta.src_addr = hdr.ipv6.src_addr[31:0];
        meta.dst_addr = hdr.ipv6.dst_addr[31:0];
        meta.protocol = hdr.ipv6.next_header;
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
        udp_checksum.subtract({hdr.udp.checksum});
        // A datagram shorter than DLCP_UDP_LENGTH_MIN is ordinary traffic, not a truncated packet. Tofino's parser has
        // no ranges, hence the masks.
        transition select(hdr.ports.dst_port, hdr.udp.length_) {
            (DLCP_PORT_BASE &&& DLCP_PORT_MASK, 0 &&& 0xFFE0): accept;
            (DLCP_PORT_BASE &&& DLCP_PORT_MASK, 32 &&& 0xFFF8): accept;
            (DLCP_PORT_BASE &&& DLCP_PORT_MASK, _): parse_dlcp;
            default: accept;
        }
    }

    state parse_dlcp {
        packet.extract(hdr.dlcp);
        udp_checksum.subtract({hdr.dlcp.queue, hdr.dlcp.drop_class, hdr.dlcp.spare, hdr.dlcp.layer});
        meta.udp_rest = udp_checksum.get();
        transition accept;
    }
}

control DlcpDeparser(packet_out packet, inout headers_t hdr, in metadata_t meta) {
    Checksum() udp_checksum;

    apply {
        // A switch does not parse the payload, so it updates the checksum incrementally.
        if (meta.cleared) {
            hdr.udp.checksum = udp_checksum.update(
                { hdr.dlcp.queue, hdr.dlcp.drop_class, hdr.dlcp.spare, hdr.dlcp.layer, meta.udp_rest }, true);
        }
        packet.emit(hdr);
    }
}

// Egress parses only the headers that it changes.
parser DlcpEgressParser(
    packet_in packet, out headers_t hdr, out egress_metadata_t meta, out egress_intrinsic_metadata_t eg) {
    state start {
        packet.extract(eg);
        transition select(packet.lookahead<bit<8>>()) {
            KIND_REPORT: parse_report;
            default: parse_bridge;
        }
    }

    state parse_report {
        packet.extract(hdr.report);
        transition accept;
    }

    state parse_bridge {
        packet.extract(hdr.bridge);
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

    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        transition accept;
    }

    state parse_ipv6 {
        packet.extract(hdr.ipv6);
        transition accept;
    }
}

control DlcpEgressDeparser(
    packet_out packet, inout headers_t hdr, in egress_metadata_t meta,
    in egress_intrinsic_metadata_for_deparser_t to_deparser) {
    Checksum() ipv4_checksum;
    Mirror(REPORT_MIRROR) report;

    apply {
        if (to_deparser.mirror_type == REPORT_MIRROR) {
            report.emit<report_t>(
                meta.report_session, { meta.report_kind, meta.report_queue, meta.depth_cells });
        }
        if (hdr.ipv4.isValid()) {
            hdr.ipv4.hdr_checksum = ipv4_checksum.update(
                { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.dscp, hdr.ipv4.ecn, hdr.ipv4.total_len,
                  hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.frag_offset, hdr.ipv4.ttl, hdr.ipv4.protocol,
                  hdr.ipv4.src_addr, hdr.ipv4.dst_addr });
        }
        packet.emit(hdr.report);
        packet.emit(hdr.ethernet);
        packet.emit(hdr.vlan);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.ipv6);
    }
}
