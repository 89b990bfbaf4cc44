// SPDX-License-Identifier: Apache-2.0
// Every number the switch programs share. dlcp/wire holds the same values for the hosts; a test compares the two.
#ifndef DLCP_CONSTANTS_P4
#define DLCP_CONSTANTS_P4

const bit<16> ETHERTYPE_IPV4 = 0x0800;
const bit<8> PROTOCOL_TCP = 6;
const bit<8> PROTOCOL_UDP = 17;

// UDP destination ports 53696-53703: one aligned block of eight in the dynamic range.
const bit<16> DLCP_PORT_BASE = 53696;
const bit<16> DLCP_PORT_MASK = 0xFFF8;
const bit<16> DLCP_UDP_LENGTH_MIN = 40; // UDP header (8) + DLCP header (32)

const bit<4> DLCP_VERSION = 1;
const bit<4> DLCP_DATA = 1;

// Queues, 7 the most urgent: hosts put control packets there. Ordinary traffic sits below the gradients and above what a
// job sends over its share.
const bit<3> QUEUE_ORDINARY = 1;
const bit<3> QUEUE_EXCESS = 0;

const bit<3> CLASS_NEVER = 0; // never dropped by policy; 1 is the most, 7 the least valuable class that may be

const bit<2> METER_GREEN = 0;
const bit<2> ECN_NOT_CAPABLE = 0;
const bit<2> ECN_CONGESTED = 3;

// A budget slot that nobody used for this long may be taken by another message. Chosen by us: longer than any
// message lives, so that a message never loses its count, and short enough to hand slots on between steps.
const bit<32> SLOT_IDLE_US = 1000000;
const bit<32> SLOT_OWNED = 0x80000000; // set in every owner, so that 0 is a slot that was never used

// What ingress_events and egress_events count, the low bits of their index.
const bit<3> EVENT_NO_ROUTE = 0;
const bit<3> EVENT_REFUSED = 1;      // not a packet a router may forward: cut short, version, options, checksum, TTL
const bit<3> EVENT_UNTRUSTED = 2;    // tags cleared
const bit<3> EVENT_OVER_SHARE = 3;   // moved to QUEUE_EXCESS
const bit<3> EVENT_POLICY_DROP = 4;
const bit<3> EVENT_BUDGET_SPENT = 5; // forwarded: the message has no drop left at this switch
const bit<3> EVENT_SLOT_TAKEN = 6;   // forwarded: another live message holds the budget slot
const bit<3> EVENT_FORWARDED = 0;
const bit<3> EVENT_MARKED = 1;

#define PORT_INDEX_WIDTH 6 // ports 0-63 have counters and depth registers
#define QUEUE_WIDTH 3
#define DEPTH_INDEX_WIDTH 9 // port, queue
#define EVENT_INDEX_WIDTH 15 // port, queue, drop class, event
#define SLOT_WIDTH 16

// Where a (port, queue) or a (port, queue, drop class, event) stands in its array.
#define DEPTH_INDEX(port, queue) ((bit<32>)((port)[PORT_INDEX_WIDTH - 1:0] ++ (queue)))
#define EVENT_INDEX(port, queue, drop_class, event) \
    ((bit<32>)((port)[PORT_INDEX_WIDTH - 1:0] ++ (queue) ++ (drop_class) ++ (event)))

const bit<32> DEPTH_REGISTER_SIZE = 1 << DEPTH_INDEX_WIDTH;
const bit<32> EVENT_COUNTER_SIZE = 1 << EVENT_INDEX_WIDTH;
const bit<32> SLOT_REGISTER_SIZE = 1 << SLOT_WIDTH;

const bit<32> TRUST_TABLE_SIZE = 64;
const bit<32> ROUTE_TABLE_SIZE = 16384;
const bit<32> ROUTE_MEMBERS_SIZE = 1024;
const bit<32> SHARE_TABLE_SIZE = 8192;
const bit<32> CLASSIFY_TABLE_SIZE = 512;
const bit<32> THRESHOLD_TABLE_SIZE = 64;
const bit<32> ECN_TABLE_SIZE = 8;

#endif
