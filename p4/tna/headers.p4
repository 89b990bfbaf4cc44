// SPDX-License-Identifier: Apache-2.0
// What one stage of a Tofino tells the next. The headers of packets are those of ../shared/headers.p4.
#ifndef DLCP_TNA_HEADERS_P4
#define DLCP_TNA_HEADERS_P4

#include "../shared/headers.p4"

// The first byte of all that reaches egress says what it is.
const bit<8> KIND_PACKET = 1;
const bit<8> KIND_REPORT = 2;

typedef bit<PORT_INDEX_WIDTH> port_index_t;
typedef bit<DEPTH_INDEX_WIDTH> depth_index_t;
typedef bit<EVENT_INDEX_WIDTH> event_index_t;
typedef bit<CLASS_INDEX_WIDTH> class_index_t;
typedef bit<SLOT_WIDTH> slot_index_t;

// Goes before each packet from ingress to egress.
header bridge_t {
    bit<8> kind;
    @flexible bit<PORT_INDEX_WIDTH> port;
    @flexible bit<3> queue;
    @flexible bit<3> drop_class;
    @flexible bit<1> droppable; // coloured for the traffic manager to drop
}

// The depth of a queue, on its way from egress back to ingress.
header report_t {
    bit<8> kind;
    bit<16> queue; // as DEPTH_INDEX counts queues
    bit<32> depth_cells;
}

// The number that the fabric gives to a port, as the driver keeps it for each device port.
struct port_metadata_t {
    bit<9> port;
}

struct headers_t {
    bridge_t bridge;
    report_t report;
    ethernet_t ethernet;
    ipv4_t ipv4;
    ports_t ports;
    udp_t udp;
    dlcp_t dlcp;
}

struct metadata_t {
    bit<1> tagged;      // a DLCP packet: its queue and drop class count
    bit<1> refused;     // to be dropped, whatever else is found out
    bit<1> is_control;
    bit<3> queue;
    bit<3> drop_class;
    bit<16> src_port;   // of TCP and UDP; zero where the parser reads no ports
    bit<16> dst_port;
    bit<32> entropy;    // differs from packet to packet where packets of a flow may take different paths
    bit<2> color;
    bit<1> may_drop;    // neither protected nor control, and of a class that may be dropped
    bit<1> droppable;   // the traffic manager drops it if its queue is as deep as was reported
    bit<1> excess;      // over the job's share: the traffic manager drops it if its queue is deep, whatever its budget
    port_metadata_t ig; // ports have the fabric's numbers up to the very end
    bit<9> eg_port;
    bit<1> counted;     // count `event` at `event_port`
    bit<3> event;
    port_index_t event_port;
    bool checksum_error;
    bool cleared;       // the UDP checksum has to follow tags that were cleared
    bit<16> udp_rest;   // what the UDP checksum says of all but the word of the tags
}

struct egress_metadata_t {
    bit<32> depth_cells;
    bit<32> over_cells;
    MirrorId_t report_session;
    bit<8> report_kind;
    bit<16> report_queue;
}

#endif
