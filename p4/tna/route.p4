// SPDX-License-Identifier: Apache-2.0

// Longest-prefix routing over groups of equal-cost ports. Gradients need no order, so each packet selects its own port
// (spraying). Other flows stay on one path, because TCP treats reordering as loss.
control Route(
    inout headers_t hdr, inout metadata_t meta, in ingress_intrinsic_metadata_from_parser_t from_parser) {
    // Eight more bits (protocol) follow the packet's number in the hash input. With them, consecutive numbers use 2, 4,
    // 8, ... ports in turn. Without them, the low six bits of CRC-32 take only 16 of 64 values, and CRC-16 takes fewer.
    Hash<bit<32>>(HashAlgorithm_t.CRC32) route_hash;
    ActionProfile(ROUTE_MEMBERS_SIZE) route_members;
    ActionSelector(
        route_members, route_hash, SelectorMode_t.FAIR, ROUTE_GROUP_SIZE_MAX, ROUTE_GROUPS_SIZE) route_selector;

    action to_next_hop(bit<9> port, bit<48> mac) {
        meta.eg_port = port;
        hdr.ethernet.src_addr = hdr.ethernet.dst_addr;
        hdr.ethernet.dst_addr = mac;
    }

    table ipv4_route {
        key = {
            hdr.ipv4.dst_addr: lpm @name("ipv4_dst");
            meta.src_addr: selector;
            meta.dst_addr: selector;
            meta.src_port: selector;
            meta.dst_port: selector;
            meta.entropy: selector;
            meta.protocol: selector;
        }
        actions = { to_next_hop; @defaultonly NoAction; }
        implementation = route_selector;
        size = ROUTE_TABLE_SIZE;
    }

    table ipv6_route {
        key = {
            hdr.ipv6.dst_addr: lpm @name("ipv6_dst");
            meta.src_addr: selector;
            meta.dst_addr: selector;
            meta.src_port: selector;
            meta.dst_port: selector;
            meta.entropy: selector;
            meta.protocol: selector;
        }
        actions = { to_next_hop; @defaultonly NoAction; }
        implementation = route_selector;
        size = IPV6_ROUTES_IN_TCAM;
    }

    action to_port(bit<9> port) {
        meta.eg_port = port;
    }

    action no_route() {
        meta.refused = 1;
    }

    table ethernet_route {
        key = { hdr.ethernet.dst_addr: exact @name("ethernet_dst"); }
        actions = { to_port; no_route; }
        const default_action = no_route();
        size = ROUTE_TABLE_SIZE;
    }

    action refuse(bit<3> event) {
        meta.refused = 1;
        meta.counted = 1;
        meta.event = event;
        meta.event_port = meta.ig.port[PORT_INDEX_WIDTH - 1:0];
    }

    apply {
        // Reading parser_err makes the parser deliver packets with errors instead of dropping them.
        if (from_parser.parser_err != PARSER_ERROR_OK) {
            // The packet ends within a header, so its receiver could not parse it either.
            refuse(EVENT_REFUSED);
        } else if (hdr.ipv4.isValid()) {
            if (hdr.ipv4.version != 4 || hdr.ipv4.ihl != 5 || hdr.ipv4.ttl <= 1 || meta.checksum_error) {
                refuse(EVENT_REFUSED);
            } else {
                hdr.ipv4.ttl = hdr.ipv4.ttl - 1;
                if (!ipv4_route.apply().hit) {
                    refuse(EVENT_NO_ROUTE);
                }
            }
        } else if (hdr.ipv6.isValid()) {
            if (hdr.ipv6.version != 6 || hdr.ipv6.hop_limit <= 1) {
                refuse(EVENT_REFUSED);
            } else {
                hdr.ipv6.hop_limit = hdr.ipv6.hop_limit - 1;
                if (!ipv6_route.apply().hit) {
                    refuse(EVENT_NO_ROUTE);
                }
            }
        } else {
            ethernet_route.apply();
            if (meta.refused == 1) {
                refuse(EVENT_NO_ROUTE);
            }
        }
    }
}
