// SPDX-License-Identifier: Apache-2.0
// What p4/v1model/dlcp.p4 does not have: the other kinds of match, an indirect meter, an action profile without a
// selector, constant entries, and actions for entries or for the default only. Compiled files lie next to this one:
//   p4c-bm2-ss --std p4-16 --Werror -o kinds.json --p4runtime-files kinds.p4info.txtpb kinds.p4

#include <core.p4>
#include <v1model.p4>

header ethernet_t {
    bit<48> dst;
    bit<48> src;
    bit<16> type;
}

struct headers_t {
    ethernet_t ethernet;
}

struct metadata_t {
    bit<32> colour;
}

parser KindsParser(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    state start {
        packet.extract(hdr.ethernet);
        transition accept;
    }
}

control Verify(inout headers_t hdr, inout metadata_t meta) {
    apply {}
}

control KindsIngress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    meter(16, MeterType.packets) colours;
    action_profile(8) plain_profile;

    action send(bit<9> port) {
        std.egress_spec = port;
    }
    action drop() {
        mark_to_drop(std);
    }
    action entry_only() {
        hdr.ethernet.src = 1;
    }
    action default_only(bit<16> type) {
        hdr.ethernet.type = type;
    }
    action measure(bit<32> index) {
        colours.execute_meter(index, meta.colour);
    }

    table ranged {
        key = {
            hdr.ethernet.type : range @name("type");
            std.ingress_port : exact @name("ig_port");
        }
        actions = {
            send;
            drop;
        }
        default_action = drop();
        size = 32;
    }
    table optioned {
        key = {
            hdr.ethernet.type : optional @name("type");
            std.ingress_port : ternary @name("ig_port");
        }
        actions = {
            send;
            @tableonly entry_only;
            @defaultonly default_only;
        }
        default_action = default_only(0x800);
        size = 32;
    }
    table profiled {
        key = {
            hdr.ethernet.src : exact @name("src");
        }
        actions = {
            send;
            drop;
        }
        implementation = plain_profile;
        size = 32;
    }
    table fixed {
        key = {
            hdr.ethernet.type : exact @name("type");
        }
        actions = {
            measure;
        }
        const entries = {
            0x800 : measure(1);
            0x806 : measure(2);
        }
    }

    apply {
        ranged.apply();
        optioned.apply();
        profiled.apply();
        fixed.apply();
    }
}

control KindsEgress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    apply {}
}

control Compute(inout headers_t hdr, inout metadata_t meta) {
    apply {}
}

control Deparse(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
    }
}

V1Switch(KindsParser(), Verify(), KindsIngress(), KindsEgress(), Compute(), Deparse()) main;
