// SPDX-License-Identifier: Apache-2.0
// What one stage of a v1model switch tells the next.
#ifndef DLCP_V1MODEL_HEADERS_P4
#define DLCP_V1MODEL_HEADERS_P4

#include "../shared/headers.p4"

struct headers_t {
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
    bit<32> path;       // chooses among equal-cost ports: the flow's hash, plus a number where packets take turns
    bit<2> color;
}

#endif
