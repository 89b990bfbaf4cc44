// SPDX-License-Identifier: Apache-2.0
// Headers, and the metadata that the blocks of a v1model switch share.
#ifndef DLCP_V1MODEL_HEADERS_P4
#define DLCP_V1MODEL_HEADERS_P4

#include "../shared/headers.p4"

struct headers_t {
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
    bit<1> trimmed;     // egress cuts it to its headers
    bit<3> queue;
    bit<3> drop_class;
    bit<16> src_port;   // of TCP and UDP; 0 if the parser has not read ports
    bit<16> dst_port;
    bit<32> path;       // selects an equal-cost port: the flow's hash, plus a packet's number if it may take any path
    bit<2> color;
}

#endif
