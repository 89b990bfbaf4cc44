// SPDX-License-Identifier: Apache-2.0
// Constants of both switch programs. dlcp/wire defines the same values for the hosts; a test compares them.
#ifndef DLCP_CONSTANTS_P4
#define DLCP_CONSTANTS_P4

const bit<16> ETHERTYPE_IPV4 = 0x0800;
const bit<16> ETHERTYPE_VLAN = 0x8100;
const bit<16> ETHERTYPE_IPV6 = 0x86DD;
const bit<8> PROTOCOL_TCP = 6;
const bit<8> PROTOCOL_UDP = 17;

// UDP destination ports 53696 to 53703: an aligned block of eight in the dynamic range.
const bit<16> DLCP_PORT_BASE = 53696;
const bit<16> DLCP_PORT_MASK = 0xFFF8;
const bit<16> DLCP_UDP_LENGTH_MIN = 40; // UDP header (8) + DLCP header (32)

// What trimming leaves: headers only, and the DSCP of the queue for control packets.
const bit<16> TRIMMED_IPV4_LENGTH = 60;     // IPv4 header (20) + DLCP_UDP_LENGTH_MIN
const bit<32> TRIMMED_FRAME_BYTES = 74;     // of an untagged IPv4 packet
const bit<32> TRIMMED_MORE_BYTES_VLAN = 4;
const bit<32> TRIMMED_MORE_BYTES_IPV6 = 20;
const bit<6> TRIMMED_DSCP = 0x3B;           // queue 7, not droppable

const bit<4> DLCP_VERSION = 1;
const bit<4> DLCP_DATA = 1;

// Queue 7 is the most urgent; hosts use it for control packets. Ordinary traffic has a lower priority than gradients,
// and a higher one than traffic beyond a job's share.
const bit<3> QUEUE_ORDINARY = 1;
const bit<3> QUEUE_EXCESS = 0;
const bit<3> QUEUE_CONTROL = 7;

const bit<3> CLASS_NEVER = 0; // never dropped by policy; 1 is the most, 7 the least valuable class that may be

const bit<2> METER_GREEN = 0;
const bit<2> ECN_NOT_CAPABLE = 0;
const bit<2> ECN_CONGESTED = 3;

// A message may take a budget slot that has been idle for this long. That is longer than a message lasts, so no message
// loses its count, and short enough to free slots between training steps.
const bit<32> SLOT_IDLE_US = 1000000;
const bit<32> SLOT_OWNED = 0x80000000; // set in every owner: 0 means that the slot has never been used

// Events: the low bits of an index into ingress_events or egress_events.
const bit<3> EVENT_NO_ROUTE = 0;
const bit<3> EVENT_REFUSED = 1;      // a router must not forward it: truncated; IP version, options, checksum or TTL
const bit<3> EVENT_UNTRUSTED = 2;    // tags cleared
const bit<3> EVENT_OVER_SHARE = 3;   // moved to QUEUE_EXCESS
const bit<3> EVENT_POLICY_DROP = 4;
const bit<3> EVENT_BUDGET_SPENT = 5; // forwarded: the message has no drop left at this switch
const bit<3> EVENT_SLOT_TAKEN = 6;   // forwarded: another live message holds the budget slot
const bit<3> EVENT_TRIMMED = 7;      // cut to its headers instead of dropped, and moved to QUEUE_CONTROL
const bit<3> EVENT_FORWARDED = 0;
const bit<3> EVENT_MARKED = 1;

#define PORT_INDEX_WIDTH 6 // ports 0 to 63 have counters and depth registers
#define QUEUE_WIDTH 3
#define DEPTH_INDEX_WIDTH 9 // port, queue
#define EVENT_INDEX_WIDTH 15 // port, queue, drop class, event
#define SLOT_WIDTH 16

// Array indices of (port, queue) and of (port, queue, drop class, event).
#define DEPTH_INDEX(port, queue) ((bit<32>)((port)[PORT_INDEX_WIDTH - 1:0] ++ (queue)))
#define EVENT_INDEX(port, queue, drop_class, event) \
    ((bit<32>)((port)[PORT_INDEX_WIDTH - 1:0] ++ (queue) ++ (drop_class) ++ (event)))

const bit<32> DEPTH_REGISTER_SIZE = 1 << DEPTH_INDEX_WIDTH;
const bit<32> EVENT_COUNTER_SIZE = 1 << EVENT_INDEX_WIDTH;
const bit<32> SLOT_REGISTER_SIZE = 1 << SLOT_WIDTH;

const bit<32> TRUST_TABLE_SIZE = 64;
const bit<32> ROUTE_TABLE_SIZE = 16384;
const bit<32> IPV6_ROUTE_TABLE_SIZE = 4096;
const bit<32> ROUTE_MEMBERS_SIZE = 1024;
const bit<32> SHARE_TABLE_SIZE = 8192;
const bit<32> CLASSIFY_TABLE_SIZE = 512;
const bit<32> THRESHOLD_TABLE_SIZE = 64;
const bit<32> BUDGET_TABLE_SIZE = 512;
const bit<32> TRIMMING_TABLE_SIZE = 1024;
const bit<32> ECN_TABLE_SIZE = 8;

#endif
