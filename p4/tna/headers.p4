// SPDX-License-Identifier: Apache-2.0
// Internal headers and metadata; the headers of packets are in ../shared/headers.p4.
#ifndef DLCP_TNA_HEADERS_P4
#define DLCP_TNA_HEADERS_P4

#include "../shared/headers.p4"

// The first byte of each packet in egress: a forwarded packet, or a report.
const bit<8> KIND_PACKET = 1;
const bit<8> KIND_REPORT = 2;

typedef bit<PORT_INDEX_WIDTH> port_index_t;
typedef bit<DEPTH_INDEX_WIDTH> depth_index_t;
typedef bit<EVENT_INDEX_WIDTH> event_index_t;
typedef bit<CLASS_INDEX_WIDTH> class_index_t;
typedef bit<SLOT_WIDTH> slot_index_t;

// Precedes each packet between ingress and egress.
header bridge_t {
    bit<8> kind;
    @flexible bit<PORT_INDEX_WIDTH> port;
    @flexible bit<3> queue;
    @flexible bit<3> drop_class;
    @flexible bit<1> droppable; // coloured red: the traffic manager may drop it
}

// A queue's depth, sent from egress to ingress.
header report_t {
    bit<8> kind;
    bit<16> queue; // its DEPTH_INDEX
    bit<32> depth_cells;
}

// A port's number in the fabric, which the driver stores for each device port.
struct port_metadata_t {
    bit<9> port;
}

struct headers_t {
    bridge_t bridge;
    report_t report;
    ethernet_t ethernet;
    vlan_t vlan;
    ipv4_t ipv4;
    ipv6_t ipv6;
    ports_t ports;
    udp_t udp;
    dlcp_t dlcp;
}

struct metadata_t {
    bit<1> tagged;      // a DLCP packet from a trusted port: its tags are used
    bit<1> refused;     // dropped in any case
    bit<1> is_control;
    bit<3> queue;
    bit<3> drop_class;
    bit<32> src_addr;   // of the flow, for IPv6 the low bits
    bit<32> dst_addr;
    bit<8> protocol;
    bit<16> src_port;   // of TCP and UDP; 0 if the parser has not read ports
    bit<16> dst_port;
    bit<32> entropy;    // differs between the packets of a flow that may take different paths
    bit<2> color;
    bit<16> budget;     // this switch's part of the message's budget
    bit<1> may_drop;    // data that is not protected, in a class that may be dropped
    bit<1> droppable;   // within its budget: the traffic manager drops it if its queue is still deep
    bit<1> excess;      // beyond the job's share: the traffic manager drops it if its queue is deep, regardless of budget
    port_metadata_t ig; // ports have their fabric numbers until ports.p4 replaces them
    bit<9> eg_port;
    bit<1> counted;     // count `event` at `event_port`
    bit<3> event;
    port_index_t event_port;
    bool checksum_error;
    bool cleared;       // tags were cleared: the deparser updates the UDP checksum
    bit<16> udp_rest;   // the partial UDP checksum of everything but the word with the tags
}

struct egress_metadata_t {
    bit<32> depth_cells;
    bit<32> over_cells;
    MirrorId_t report_session;
    bit<8> report_kind;
    bit<16> report_queue;
}

#endif
