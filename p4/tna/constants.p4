// SPDX-License-Identifier: Apache-2.0
// The numbers that only a Tofino has; all others are in ../shared/constants.p4.
#ifndef DLCP_TNA_CONSTANTS_P4
#define DLCP_TNA_CONSTANTS_P4

#include "../shared/constants.p4"

#define CLASS_INDEX_WIDTH 12 // port, queue, drop class
const bit<32> CLASS_COUNTER_SIZE = 1 << CLASS_INDEX_WIDTH;

const bit<32> PORT_TABLE_SIZE = 1 << PORT_INDEX_WIDTH;

// A group may be as large as a switch has ports, and every member may be in several groups.
const bit<32> ROUTE_GROUP_SIZE_MAX = 64;
const bit<32> ROUTE_GROUPS_SIZE = 256;

// Device ports 68, 196, 324 and 452: one in each pipe leads back to its ingress.
const PortId_t RECIRCULATION_PORT = 68;
const PortId_t RECIRCULATION_PORT_MASK = 0x7F;

const MirrorType_t REPORT_MIRROR = 1;
const MirrorId_t REPORT_SESSION = 1; // the session that setup.py makes

// Egress reports the depth of a queue when it has changed by more than this since its last report. Chosen by us:
// 16 cells of 80 bytes are a packet of 1,280 bytes, less than one step of the finest thresholds, and a queue that fills
// or drains at the rate of its port is reported no more than once in each such packet.
const int<32> REPORT_STEP_CELLS = 16;

// Time in units of 2^16 ns (65.536 us), of which 32 bits hold 78 hours.
const int<32> SLOT_IDLE_TICKS = (int<32>)(bit<32>)((48w1000 * (bit<48>)SLOT_IDLE_US) >> 16);

// What SelectiveDrop's claim finds in a slot: one bit for each pair of (it is ours, nobody used it for long).
const bit<8> SLOT_OF_ANOTHER = 1;
const bit<8> SLOT_FREE = 4;

// egress_events counts each packet once, so an event is a set of bits: EVENT_MARKED and this.
const bit<3> EVENT_SPARED = 2; // coloured for the traffic manager to drop, but its queue had drained

// Colours for the traffic manager. Of a colour it drops what finds the queue deeper than that colour's limit.
// Green, 0, is what all packets are that a program does not colour: they are dropped only when their queue is full.
const bit<2> COLOR_DROP = 3; // red: dropped from drop_limit_red on

#endif
