// SPDX-License-Identifier: Apache-2.0
// The DLCP switch for Tofino (TNA). Tables and controls are those of ../v1model/dlcp.p4; ../README.md lists the
// differences and their reasons.

#include <core.p4>
#include <tna.p4>

#include "constants.p4"
#include "headers.p4"

// Each queue's depth in cells, as egress reported it last; see report.p4.
Register<bit<32>, depth_index_t>(DEPTH_REGISTER_SIZE) queue_depth;

#include "parser.p4"
#include "police.p4"
#include "route.p4"
#include "classify.p4"
#include "drop.p4"
#include "ports.p4"
#include "report.p4"

control DlcpIngress(
    inout headers_t hdr, inout metadata_t meta, in ingress_intrinsic_metadata_t ig,
    in ingress_intrinsic_metadata_from_parser_t from_parser,
    inout ingress_intrinsic_metadata_for_deparser_t to_deparser, inout ingress_intrinsic_metadata_for_tm_t tm) {
    PortTrust() trust;
    Route() route;
    Classify() classify;
    JobShare() share;
    SelectiveDrop() selective_drop;
    Ports() ports;

    Counter<bit<64>, event_index_t>(EVENT_COUNTER_SIZE, CounterType_t.PACKETS_AND_BYTES) ingress_events;
    Hash<event_index_t>(HashAlgorithm_t.IDENTITY) index;

    apply {
        if (hdr.report.isValid()) {
            meta.refused = 1;
        } else {
            // After a parser error, a truncated header may still be valid.
            if (hdr.dlcp.isValid() && hdr.dlcp.version == DLCP_VERSION && from_parser.parser_err == PARSER_ERROR_OK) {
                trust.apply(hdr, meta);
                if (hdr.dlcp.type != DLCP_DATA || hdr.dlcp.trimmed == 1) {
                    meta.is_control = 1;
                } else if (hdr.dlcp.retransmission == 0) {
                    meta.entropy = hdr.dlcp.index + hdr.dlcp.step;
                } else {
                    // A retransmission takes another path than the original.
                    meta.entropy = ~(hdr.dlcp.index ^ hdr.dlcp.step);
                }
            }
            route.apply(hdr, meta, from_parser);
            if (meta.tagged == 1 && meta.refused == 0) {
                classify.apply(hdr, meta);
                share.apply(hdr, meta);
                if (meta.is_control == 0 && meta.drop_class != CLASS_NEVER &&
                    hdr.dlcp.protected == 0 && hdr.dlcp.retransmission == 0) {
                    meta.may_drop = 1;
                }
            }
        }
        selective_drop.apply(hdr, meta, ig);
        ports.apply(meta, tm);
        if (meta.counted == 1) {
            ingress_events.count(index.get({ meta.event_port, meta.queue, meta.drop_class, meta.event }));
        }
        tm.qid = (QueueId_t)meta.queue;
        if (meta.droppable == 1 || meta.excess == 1) {
            tm.packet_color = COLOR_DROP;
        }
        if (meta.refused == 1) {
            to_deparser.drop_ctl = 1;
        }
        hdr.bridge.setValid();
        hdr.bridge.kind = KIND_PACKET;
        hdr.bridge.port = meta.eg_port[PORT_INDEX_WIDTH - 1:0];
        hdr.bridge.queue = meta.queue;
        hdr.bridge.drop_class = meta.drop_class;
        hdr.bridge.droppable = meta.droppable;
    }
}

control DlcpEgress(
    inout headers_t hdr, inout egress_metadata_t meta, in egress_intrinsic_metadata_t eg,
    in egress_intrinsic_metadata_from_parser_t from_parser,
    inout egress_intrinsic_metadata_for_deparser_t to_deparser,
    inout egress_intrinsic_metadata_for_output_port_t to_port) {
    DepthReport() report;

    Counter<bit<64>, event_index_t>(EVENT_COUNTER_SIZE, CounterType_t.PACKETS_AND_BYTES) egress_events;
    Hash<event_index_t>(HashAlgorithm_t.IDENTITY) index;

    bit<32> limit_cells = 0;
    bit<1> marked = 0;

    // An action, because a condition on Tofino cannot subtract.
    action subtract() {
        meta.over_cells = meta.depth_cells |-| limit_cells;
    }

    table over_threshold {
        actions = { subtract; }
        const default_action = subtract();
        size = 1;
    }

    action mark_above(bit<19> depth) {
        limit_cells = (bit<32>)depth;
    }

    table ecn_threshold {
        key = { hdr.bridge.queue: exact @name("queue"); }
        actions = { mark_above; @defaultonly NoAction; }
        const default_action = NoAction();
        size = ECN_TABLE_SIZE;
    }

    apply {
        if (hdr.bridge.isValid()) {
            meta.depth_cells = (bit<32>)eg.deq_qdepth;
            if (ecn_threshold.apply().hit) {
                over_threshold.apply();
                if (meta.over_cells != 0) {
                    if (hdr.ipv4.isValid() && hdr.ipv4.ecn != ECN_NOT_CAPABLE) {
                        hdr.ipv4.ecn = ECN_CONGESTED;
                        marked = 1;
                    } else if (hdr.ipv6.isValid() && hdr.ipv6.ecn != ECN_NOT_CAPABLE) {
                        hdr.ipv6.ecn = ECN_CONGESTED;
                        marked = 1;
                    }
                }
            }
            egress_events.count(index.get(
                { hdr.bridge.port, hdr.bridge.queue, hdr.bridge.drop_class, 1w0, hdr.bridge.droppable, marked }));
            report.apply(meta, hdr.bridge, to_deparser);
        }
    }
}

Pipeline(
    DlcpParser(), DlcpIngress(), DlcpDeparser(), DlcpEgressParser(), DlcpEgress(), DlcpEgressDeparser()) pipe;

Switch(pipe) main;
