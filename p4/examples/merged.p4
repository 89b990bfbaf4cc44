// SPDX-License-Identifier: Apache-2.0
// An example for p4/README.md, "Merge it into another P4 program": a small IPv4 router with an access list, to which the
// part of DLCP that drops by value was added. Comments that begin with "DLCP" mark the additions.

#include <core.p4>
#define V1MODEL_VERSION 20200408
#include <v1model.p4>

// DLCP: constants, and headers in place of the router's own Ethernet, IPv4 and UDP.
#include "../shared/constants.p4"
#include "../shared/headers.p4"

struct headers_t {
    ethernet_t ethernet;
    ipv4_t ipv4;
    ports_t ports;
    udp_t udp;
    // DLCP: its header, and two that its controls name. This router parses neither, so they are never valid.
    dlcp_t dlcp;
    vlan_t vlan;
    ipv6_t ipv6;
}

struct metadata_t {
    bit<1> denied;
    // DLCP: the members of its metadata_t that the files below name.
    bit<1> tagged;
    bit<1> refused;
    bit<1> is_control;
    bit<1> trimmed;
    bit<3> queue;
    bit<3> drop_class;
    bit<2> color;
}

const bit<9> PORT_NONE = 511; // where mark_to_drop sends a packet

// DLCP: the controls use the first two by these names.
register<bit<19>, bit<32>>(DEPTH_REGISTER_SIZE) queue_depth;
counter<bit<32>>(EVENT_COUNTER_SIZE, CounterType.packets_and_bytes) ingress_events;
counter<bit<32>>(EVENT_COUNTER_SIZE, CounterType.packets_and_bytes) egress_events;

// DLCP: the controls. The compiler removes JobShare, which is also in police.p4, because nothing applies it.
#include "../v1model/police.p4"
#include "../v1model/classify.p4"
#include "../v1model/drop.p4"

parser RouterParser(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHERTYPE_IPV4: parse_ipv4;
            default: accept;
        }
    }

    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.frag_offset, hdr.ipv4.protocol) {
            (4, 5, 0, PROTOCOL_UDP): parse_udp;
            default: accept;
        }
    }

    state parse_udp {
        packet.extract(hdr.ports);
        packet.extract(hdr.udp);
        // DLCP: the ports that it uses, if the datagram has room for its header.
        transition select(hdr.ports.dst_port, hdr.udp.length_) {
            (DLCP_PORT_BASE &&& DLCP_PORT_MASK, 0 .. DLCP_UDP_LENGTH_MIN - 1): accept;
            (DLCP_PORT_BASE &&& DLCP_PORT_MASK, _): parse_dlcp;
            default: accept;
        }
    }

    // DLCP
    state parse_dlcp {
        packet.extract(hdr.dlcp);
        transition accept;
    }
}

control RouterVerifyChecksum(inout headers_t hdr, inout metadata_t meta) {
    apply {
        verify_checksum(hdr.ipv4.isValid() && hdr.ipv4.ihl == 5,
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.dscp, hdr.ipv4.ecn, hdr.ipv4.total_len,
              hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.frag_offset, hdr.ipv4.ttl, hdr.ipv4.protocol,
              hdr.ipv4.src_addr, hdr.ipv4.dst_addr },
            hdr.ipv4.hdr_checksum, HashAlgorithm.csum16);
    }
}

control RouterIngress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    // DLCP
    PortTrust() trust;
    Classify() classify;
    SelectiveDrop() selective_drop;

    action deny() {
        meta.denied = 1;
    }

    table access_list {
        key = {
            hdr.ipv4.src_addr: ternary @name("src_addr");
            hdr.ipv4.protocol: ternary @name("protocol");
        }
        actions = { deny; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 256;
    }

    action to_next_hop(bit<9> port, bit<48> mac) {
        std.egress_spec = port;
        hdr.ethernet.src_addr = hdr.ethernet.dst_addr;
        hdr.ethernet.dst_addr = mac;
        hdr.ipv4.ttl = hdr.ipv4.ttl - 1;
    }

    action no_route() {
        meta.denied = 1;
    }

    table next_hop {
        key = { hdr.ipv4.dst_addr: lpm @name("dst_addr"); }
        actions = { to_next_hop; no_route; }
        const default_action = no_route();
        size = 1024;
    }

    apply {
        // DLCP: before anything reads the packet's DSCP, which PortTrust may clear.
        meta.queue = QUEUE_ORDINARY;
        if (hdr.dlcp.isValid() && hdr.dlcp.version == DLCP_VERSION) {
            trust.apply(hdr, meta, std);
        }

        // The router's own decision: drop the packet, or choose its port.
        if (std.parser_error != error.NoError || std.checksum_error == 1 || !hdr.ipv4.isValid() ||
            hdr.ipv4.version != 4 || hdr.ipv4.ihl != 5 || hdr.ipv4.ttl <= 1) {
            meta.denied = 1;
        } else {
            access_list.apply();
            next_hop.apply();
        }

        // DLCP: for packets that the router forwards, now that their port is known.
        if (meta.denied == 0 && meta.tagged == 1) {
            classify.apply(hdr, meta);
            if (hdr.dlcp.type == DLCP_DATA && hdr.dlcp.trimmed == 0 && hdr.dlcp.protected == 0 &&
                hdr.dlcp.retransmission == 0 && meta.drop_class != CLASS_NEVER) {
                selective_drop.apply(hdr, meta, std);
            }
        }

        // DLCP: `refused` and the priority. BMv2 sends queue 7 first.
        if (meta.denied == 1 || meta.refused == 1) {
            mark_to_drop(std);
        }
        std.priority = meta.queue;

        // DLCP: last, count every packet that is queued, including ordinary traffic.
        if (std.egress_spec != PORT_NONE) {
            @atomic {
                bit<19> depth;
                queue_depth.read(depth, DEPTH_INDEX(std.egress_spec, meta.queue));
                queue_depth.write(DEPTH_INDEX(std.egress_spec, meta.queue), depth + 1);
            }
        }
    }
}

control RouterEgress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    // DLCP: ECN marks.
    bit<19> limit = 0;

    action mark_above(bit<19> depth) {
        limit = depth;
    }

    table ecn_threshold {
        key = { meta.queue: exact @name("queue"); }
        actions = { mark_above; @defaultonly NoAction; }
        const default_action = NoAction();
        size = ECN_TABLE_SIZE;
    }

    apply {
        // DLCP: the true depth, at every departure.
        queue_depth.write(DEPTH_INDEX(std.egress_port, meta.queue), std.deq_qdepth);
        egress_events.count(EVENT_INDEX(std.egress_port, meta.queue, meta.drop_class, EVENT_FORWARDED));
        if (ecn_threshold.apply().hit && std.deq_qdepth > limit && hdr.ipv4.ecn != ECN_NOT_CAPABLE) {
            hdr.ipv4.ecn = ECN_CONGESTED;
            egress_events.count(EVENT_INDEX(std.egress_port, meta.queue, meta.drop_class, EVENT_MARKED));
        }
    }
}

control RouterUpdateChecksum(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(hdr.ipv4.isValid(),
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.dscp, hdr.ipv4.ecn, hdr.ipv4.total_len,
              hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.frag_offset, hdr.ipv4.ttl, hdr.ipv4.protocol,
              hdr.ipv4.src_addr, hdr.ipv4.dst_addr },
            hdr.ipv4.hdr_checksum, HashAlgorithm.csum16);
    }
}

control RouterDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.ports);
        packet.emit(hdr.udp);
        packet.emit(hdr.dlcp); // DLCP
    }
}

V1Switch(RouterParser(), RouterVerifyChecksum(), RouterIngress(), RouterEgress(), RouterUpdateChecksum(),
         RouterDeparser()) main;
