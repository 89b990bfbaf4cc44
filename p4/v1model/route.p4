// SPDX-License-Identifier: Apache-2.0

// Longest-prefix routing over groups of equal-cost ports. Gradients need no order, so their packets use the ports in
// turn (spraying). Other flows stay on one path, because TCP treats reordering as loss. The packet's number is added to
// the hash, not part of its input: the low six bits of CRC-32 take only 16 of 64 values over 64 consecutive numbers.
control Route(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    action_selector(HashAlgorithm.identity, ROUTE_MEMBERS_SIZE, 32) route_selector;

    action to_next_hop(bit<9> port, bit<48> mac) {
        std.egress_spec = port;
        hdr.ethernet.src_addr = hdr.ethernet.dst_addr;
        hdr.ethernet.dst_addr = mac;
    }

    table ipv4_route {
        key = {
            hdr.ipv4.dst_addr: lpm @name("ipv4_dst");
            meta.path: selector;
        }
        actions = { to_next_hop; @defaultonly NoAction; }
        implementation = route_selector;
        size = ROUTE_TABLE_SIZE;
    }

    table ipv6_route {
        key = {
            hdr.ipv6.dst_addr: lpm @name("ipv6_dst");
            meta.path: selector;
        }
        actions = { to_next_hop; @defaultonly NoAction; }
        implementation = route_selector;
        size = IPV6_ROUTE_TABLE_SIZE;
    }

    action to_port(bit<9> port) {
        std.egress_spec = port;
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

    apply {
        bit<3> event = EVENT_NO_ROUTE;
        if (std.parser_error != error.NoError) {
            // The packet ends within a header, so its receiver could not parse it either.
            meta.refused = 1;
            event = EVENT_REFUSED;
        } else if (hdr.ipv4.isValid()) {
            if (hdr.ipv4.version != 4 || hdr.ipv4.ihl != 5 || hdr.ipv4.ttl <= 1 || std.checksum_error == 1) {
                meta.refused = 1;
                event = EVENT_REFUSED;
            } else {
                bit<32> flow;
                hash(flow, HashAlgorithm.crc32, 32w0,
                     { hdr.ipv4.src_addr, hdr.ipv4.dst_addr, hdr.ipv4.protocol, meta.src_port, meta.dst_port },
                     64w0x100000000);
                meta.path = meta.path + flow;
                hdr.ipv4.ttl = hdr.ipv4.ttl - 1;
                if (!ipv4_route.apply().hit) {
                    meta.refused = 1;
                }
            }
        } else if (hdr.ipv6.isValid()) {
            if (hdr.ipv6.version != 6 || hdr.ipv6.hop_limit <= 1) {
                meta.refused = 1;
                event = EVENT_REFUSED;
            } else {
                bit<32> flow;
                hash(flow, HashAlgorithm.crc32, 32w0,
                     { hdr.ipv6.src_addr, hdr.ipv6.dst_addr, hdr.ipv6.next_header, meta.src_port, meta.dst_port },
                     64w0x100000000);
                meta.path = meta.path + flow;
                hdr.ipv6.hop_limit = hdr.ipv6.hop_limit - 1;
                if (!ipv6_route.apply().hit) {
                    meta.refused = 1;
                }
            }
        } else {
            ethernet_route.apply();
        }
        if (meta.refused == 1) {
            ingress_events.count(EVENT_INDEX(std.ingress_port, meta.queue, meta.drop_class, event));
        }
    }
}
