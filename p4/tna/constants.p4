// SPDX-License-Identifier: Apache-2.0
// Constants of the Tofino program only; ../shared/constants.p4 has the others.
#ifndef DLCP_TNA_CONSTANTS_P4
#define DLCP_TNA_CONSTANTS_P4

#include "../shared/constants.p4"

#define CLASS_INDEX_WIDTH 12 // port, queue, drop class
const bit<32> CLASS_COUNTER_SIZE = 1 << CLASS_INDEX_WIDTH;

const bit<32> PORT_TABLE_SIZE = 1 << PORT_INDEX_WIDTH;

// A route is three blocks of TCAM wide. With 4,096, the program would take a thirteenth stage.
const bit<32> IPV6_ROUTES_IN_TCAM = 2048;

// A group can hold all ports of a switch, and a member can belong to several groups.
const bit<32> ROUTE_GROUP_SIZE_MAX = 64;
const bit<32> ROUTE_GROUPS_SIZE = 256;

// Device ports 68, 196, 324 and 452: the recirculation port of each pipe.
const PortId_t RECIRCULATION_PORT = 68;
const PortId_t RECIRCULATION_PORT_MASK = 0x7F;

const MirrorType_t REPORT_MIRROR = 1;
const MirrorId_t REPORT_SESSION = 1; // the mirror session that set_up.py creates

// Egress reports a queue's depth when it has changed by more than this since the last report. 16 cells of 80 bytes are
// 1,280 bytes: less than the smallest difference between thresholds, and a queue that fills or drains at its port's
// rate causes at most one report for each 1,280 bytes.
const int<32> REPORT_STEP_CELLS = 16;

// Time in units of 2^16 ns (65.536 us); 32 bits hold 78 hours.
const int<32> SLOT_IDLE_TICKS = (int<32>)(bit<32>)((48w1000 * (bit<48>)SLOT_IDLE_US) >> 16);

// Results of SelectiveDrop's claim: one bit for each combination of (the slot is ours, the slot is idle).
const bit<8> SLOT_OF_ANOTHER = 1;
const bit<8> SLOT_FREE = 4;

// egress_events counts each packet once, so its events are bits that combine: EVENT_MARKED and this one.
const bit<3> EVENT_SPARED = 2; // coloured red, but not dropped, because its queue had drained

// The traffic manager drops a packet if its queue is deeper than the limit of the packet's colour. Packets are green
// (0) unless the program sets a colour; green packets are dropped only if their queue is full.
const bit<2> COLOR_DROP = 3; // red: dropped above drop_limit_red

#endif
