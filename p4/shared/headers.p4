// SPDX-License-Identifier: Apache-2.0
#ifndef DLCP_HEADERS_P4
#define DLCP_HEADERS_P4

header ethernet_t {
    bit<48> dst_addr;
    bit<48> src_addr;
    bit<16> ether_type;
}

// An IEEE 802.1Q tag. A packet keeps it on its way.
header vlan_t {
    bit<3> pcp;
    bit<1> dei;
    bit<12> vid;
    bit<16> ether_type;
}

header ipv4_t {
    bit<4> version;
    bit<4> ihl;
    bit<6> dscp;
    bit<2> ecn;
    bit<16> total_len;
    bit<16> identification;
    bit<3> flags;
    bit<13> frag_offset;
    bit<8> ttl;
    bit<8> protocol;
    bit<16> hdr_checksum;
    bit<32> src_addr;
    bit<32> dst_addr;
}

header ipv6_t {
    bit<4> version;
    bit<6> dscp;
    bit<2> ecn;
    bit<20> flow_label;
    bit<16> payload_len;
    bit<8> next_header;
    bit<8> hop_limit;
    bit<128> src_addr;
    bit<128> dst_addr;
}

// The fields that TCP and UDP share. They are enough to keep a flow on one path.
header ports_t {
    bit<16> src_port;
    bit<16> dst_port;
}

// The rest of the UDP header.
header udp_t {
    bit<16> length_;
    bit<16> checksum;
}

// dlcp/wire defines this header; a test compares it with the compiled program. A switch classifies packets by the first
// eight bytes, and uses the fields after them to identify messages and to choose paths.
header dlcp_t {
    bit<4> version;
    bit<4> type;
    bit<1> protected;
    bit<1> retransmission;
    bit<1> trimmed;
    bit<1> congestion;
    bit<4> flags_spare;
    bit<3> queue;
    bit<3> drop_class;
    bit<2> spare;
    bit<8> layer;
    bit<16> job;
    bit<16> budget;
    bit<32> step;
    bit<16> message;
    bit<16> sender;
    bit<32> index;
    bit<32> count;
    bit<64> token;
}

#endif
