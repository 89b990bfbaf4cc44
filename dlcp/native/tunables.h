/* SPDX-License-Identifier: Apache-2.0 */
/* The transport's constants, with their reasons. */
#pragma once

/* Loss. A packet is declared lost once a packet sent this many round trips later has arrived: the reordering window of
 * RACK (RFC 8985). It begins at one round trip, since fabrics that spray packets reorder them; grows to the reordering
 * observed, and doubles when a packet declared lost arrives. Each loss found shrinks it: 14 in order bring it to the
 * minimum. */
static const double DISORDER_FIRST = 1, DISORDER_MIN = 0.25, DISORDER_MAX = 4, DISORDER_DECAY = 0.9;
/* For this many packets after a loss, another one is expected, and a probe follows each message's last packet. At a
 * loss rate of 1 in 1,000 this misses one loss in 60. */
enum { LOSSY_PACKETS = 4096 };

/* Reports. A report moves the window and costs as much processor time as a burst of packets, so reports are a round
 * trip apart. They are at least REPORT_MIN_S apart after a loss or mark, or if the window limits slow start, and
 * otherwise REPORT_CALM_S. At a round trip of 0.1 ms the window therefore reacts 10 or 100 round trips late, which
 * costs little, as it is hardly ever the limit there; at 100 ms neither value matters. */
static const double REPORT_MIN_S = 0.001, REPORT_CALM_S = 0.01;

/* Acknowledgements. One waits for ACK_EVERY packets or for a quarter of a round trip, within these bounds. It costs as
 * much processor time as a data packet, hence the lower bound: at 0.1 ms it is two round trips, but a message's last
 * packet is acknowledged at once. The upper bound applies until a round trip is known; at 100 ms it makes a round trip
 * 1 % longer. */
enum { ACK_EVERY = 8 };
static const double ACK_DELAY_S = 0.0002, ACK_DELAY_MAX_S = 0.001;
/* On fast paths they are at least this far apart, up to this part of a round trip or this many packets. Chosen by
 * processor time on a loopback; TACK (SIGCOMM 2020) finds that two to four per round trip are enough. */
static const double ACK_SPACING_S = 0.0002, ACK_ROUND_TRIPS = 0.125;
enum { ACK_AT_ONCE = 512 };

/* Probes. The timeout until a round trip is known: a needless probe costs two small packets, so it may be short. At 0.1
 * ms a loss in the first message waits this long; at 100 ms the first message sends some needless probes. */
static const double INITIAL_RTT_S = 0.02;
/* The timeout is at most this or two round trips, whichever is longer. It limits the effect of an outlier. */
static const double PROBE_TIMEOUT_MAX_S = 0.2;
/* Probes without progress back off to at most two to the power of this many timeouts. */
enum { BACKOFF_DOUBLINGS_MAX = 6 };
/* This many unanswered probes count as one answer without progress. At 30 % loss, half of them are answered. */
enum { UNANSWERED_PATIENCE = 4 };
/* A path is suspected of an MTU that has shrunk after this many timeouts without a full packet's arrival. A needless
 * suspicion costs some probes of the path; a congested port is rarely full for this long. */
enum { NARROW_TIMEOUTS = 4 };
/* STOP is repeated after a probe timeout, then after twice as long each time, up to this. */
static const double STOP_REPEAT_MAX_S = 0.5;
/* KNOWN_AFTER_S: a sender without confirmation that its message is complete probes within this time. REMIND_S: a rank
 * that leaves repeats its confirmations for this long. Both are several probe timeouts, up to a round trip of 100 ms;
 * training does not wait for them. */
static const double KNOWN_AFTER_S = 1, REMIND_S = 0.2;

/* Paths. A flow uses one path for each PATH_PACKETS of its window, so that every path always carries some: losses are
 * found by later packets on the same path. A burst has at least PATH_BURST packets if the window allows. A path is
 * judged whenever PATH_JUDGED of its packets have been delivered or lost, by averages with these gains; the gain for
 * losses is smaller, since a full queue loses many packets at a time. */
enum { PATH_PACKETS = 4, PATH_BURST = 4, PATH_JUDGED = 32 };
static const double PATH_GAIN = 0.25, PATH_LOSS_GAIN = 0.0625;
/* A path loses half its weight while it loses more than PATH_LOSSY of its packets and more than PATH_LOSSIER times the
 * other paths' median. It loses part of it while its delay exceeds PATH_SLOW times the best path's plus the deviation
 * of round trips, or while its share of marked packets is higher by PATH_MARKED. Below PATH_LEAST it is abandoned;
 * otherwise it regains PATH_CALM. A path at a quarter of the others' rate is hardly worth waiting for at the end of a
 * message. */
static const double PATH_LOSSY = 0.025, PATH_LOSSIER = 2, PATH_SLOW = 2, PATH_MARKED = 0.25;
static const double PATH_LEAST = 0.25, PATH_CALM = 0.125;
/* An abandoned path is tried again after PATH_AGAIN_S, then after twice as long each time, up to PATH_AGAIN_MAX_S.
 * Repairs take seconds, whatever the round trip; a trial costs one burst. */
static const double PATH_AGAIN_S = 1, PATH_AGAIN_MAX_S = 16;

/* Pacing. Packets due within this time leave together, or PATH_BURST if that is more: a timer costs as much as a burst.
 * Only paths of 5 ms and more are paced; at 100 ms it is a hundredth of a round trip. */
static const double PACE_TURN_S = 0.001;

/* Inbound rate: that of the fastest stretch of at least INBOUND_S and INBOUND_PACKETS without a pause of
 * INBOUND_PAUSE_S. A shorter stretch would measure the last switch's queue, a longer one the senders' pauses. */
static const double INBOUND_S = 0.03, INBOUND_PAUSE_S = 0.02;
enum { INBOUND_PACKETS = 8 };
