// SPDX-License-Identifier: Apache-2.0
// The DLCP switch for v1model (BMv2 and the built-in switch).

#include <core.p4>
#define V1MODEL_VERSION 20200408
#include <v1model.p4>

#include "../shared/constants.p4"
#include "headers.p4"

const bit<9> PORT_NONE = 511; // packets sent here are dropped without being queued

// The depth of each queue in packets, known in ingress, where a drop still saves space in the queue. Ingress adds one
// for each packet that it forwards. At every departure, egress overwrites the count with the depth that the traffic
// manager reports. Errors therefore last only until the next departure.
// Until then the count may be
// - too high by packets that a full queue has tail-dropped, since the program is not notified of them. Such a queue
//   holds packets, so a departure will follow, and in the meantime it really is full;
// - too low by the packets that ingress forwarded after the depth was sampled but before egress wrote it, plus one that
//   is counted but not yet enqueued. These packets are in the queue, so their departures will correct the count.
// BMv2 serves a port with one thread, so depths are written in the order of departures, and the last one writes 0.
register<bit<19>, bit<32>>(DEPTH_REGISTER_SIZE) queue_depth;

// By port. What has left one end of a link and has not arrived at the other was lost on it.
counter<bit<32>>(1 << PORT_INDEX_WIDTH, CounterType.packets) arrivals;
counter<bit<32>>(1 << PORT_INDEX_WIDTH, CounterType.packets) departures;
counter<bit<32>>(EVENT_COUNTER_SIZE, CounterType.packets_and_bytes) ingress_events;
counter<bit<32>>(EVENT_COUNTER_SIZE, CounterType.packets_and_bytes) egress_events;

#include "parser.p4"
#include "police.p4"
#include "route.p4"
#include "classify.p4"
#include "drop.p4"
#include "trim.p4"

control DlcpVerifyChecksum(inout headers_t hdr, inout metadata_t meta) {
    apply {
        verify_checksum(hdr.ipv4.isValid() && hdr.ipv4.ihl == 5,
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.dscp, hdr.ipv4.ecn, hdr.ipv4.total_len,
              hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.frag_offset, hdr.ipv4.ttl, hdr.ipv4.protocol,
              hdr.ipv4.src_addr, hdr.ipv4.dst_addr },
            hdr.ipv4.hdr_checksum, HashAlgorithm.csum16);
    }
}

control DlcpIngress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    PortTrust() trust;
    Route() route;
    Classify() classify;
    JobShare() share;
    SelectiveDrop() selective_drop;

    apply {
        arrivals.count((bit<32>)std.ingress_port[PORT_INDEX_WIDTH - 1:0]);
        meta.queue = QUEUE_ORDINARY;
        if (hdr.dlcp.isValid() && hdr.dlcp.version == DLCP_VERSION) {
            trust.apply(hdr, meta, std);
            if (hdr.dlcp.type == DLCP_DATA && hdr.dlcp.trimmed == 0) {
                // A retransmission takes another path than the original.
                meta.path = hdr.dlcp.index + hdr.dlcp.step + (bit<32>)hdr.dlcp.retransmission;
            } else {
                meta.is_control = 1;
            }
        }
        route.apply(hdr, meta, std);
        if (meta.tagged == 1 && meta.refused == 0) {
            classify.apply(hdr, meta);
            share.apply(hdr, meta, std);
            if (meta.is_control == 0 && meta.drop_class != CLASS_NEVER &&
                hdr.dlcp.protected == 0 && hdr.dlcp.retransmission == 0) {
                selective_drop.apply(hdr, meta, std);
            }
        }
        std.priority = meta.queue;
        if (meta.refused == 1) {
            mark_to_drop(std);
        } else if (std.egress_spec != PORT_NONE) {
            // BMv2 locks the register, so egress cannot write between this read and this write.
            @atomic {
                bit<19> depth;
                queue_depth.read(depth, DEPTH_INDEX(std.egress_spec, meta.queue));
                queue_depth.write(DEPTH_INDEX(std.egress_spec, meta.queue), depth + 1);
            }
        }
    }
}

control DlcpEgress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    Trim() trim;

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
        departures.count((bit<32>)std.egress_port[PORT_INDEX_WIDTH - 1:0]);
        queue_depth.write(DEPTH_INDEX(std.egress_port, meta.queue), std.deq_qdepth);
        egress_events.count(EVENT_INDEX(std.egress_port, meta.queue, meta.drop_class, EVENT_FORWARDED));
        if (ecn_threshold.apply().hit && std.deq_qdepth > limit) {
            if (hdr.ipv4.isValid() && hdr.ipv4.ecn != ECN_NOT_CAPABLE) {
                hdr.ipv4.ecn = ECN_CONGESTED;
                egress_events.count(EVENT_INDEX(std.egress_port, meta.queue, meta.drop_class, EVENT_MARKED));
            } else if (hdr.ipv6.isValid() && hdr.ipv6.ecn != ECN_NOT_CAPABLE) {
                hdr.ipv6.ecn = ECN_CONGESTED;
                egress_events.count(EVENT_INDEX(std.egress_port, meta.queue, meta.drop_class, EVENT_MARKED));
            }
        }
        if (meta.trimmed == 1) {
            trim.apply(hdr);
        }
    }
}

control DlcpUpdateChecksum(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(hdr.ipv4.isValid() && hdr.ipv4.ihl == 5,
            { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.dscp, hdr.ipv4.ecn, hdr.ipv4.total_len,
              hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.frag_offset, hdr.ipv4.ttl, hdr.ipv4.protocol,
              hdr.ipv4.src_addr, hdr.ipv4.dst_addr },
            hdr.ipv4.hdr_checksum, HashAlgorithm.csum16);
        // Of a trimmed packet, the program knows every byte, so it can compute the checksum anew.
        update_checksum(meta.trimmed == 1 && hdr.ipv4.isValid(),
            { hdr.ipv4.src_addr, hdr.ipv4.dst_addr, 8w0, hdr.ipv4.protocol, hdr.udp.length_, hdr.ports.src_port,
              hdr.ports.dst_port, hdr.udp.length_, hdr.dlcp },
            hdr.udp.checksum, HashAlgorithm.csum16);
        update_checksum(meta.trimmed == 1 && hdr.ipv6.isValid(),
            { hdr.ipv6.src_addr, hdr.ipv6.dst_addr, 16w0, hdr.udp.length_, 24w0, hdr.ipv6.next_header,
              hdr.ports.src_port, hdr.ports.dst_port, hdr.udp.length_, hdr.dlcp },
            hdr.udp.checksum, HashAlgorithm.csum16);
    }
}

control DlcpDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr);
    }
}

V1Switch(
    DlcpParser(), DlcpVerifyChecksum(), DlcpIngress(), DlcpEgress(), DlcpUpdateChecksum(), DlcpDeparser()) main;
