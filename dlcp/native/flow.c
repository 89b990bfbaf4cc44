/* SPDX-License-Identifier: Apache-2.0 */
/* Round-trip times to a peer, and the timeouts derived from them. */

#include "flow.h"

#include <math.h>

/* Add a sample to an average and its mean deviation (RFC 6298). */
static void smooth(double *average_s, double *deviation_s, double sample_s) {
    if (*average_s == 0) {
        *average_s = sample_s;
        *deviation_s = sample_s / 2;
        return;
    }
    *deviation_s += (fabs(*average_s - sample_s) - *deviation_s) / 4;
    *average_s += (sample_s - *average_s) / 8;
}

/* Add a sample of a round trip in the network, if one is known, and of the time until the answer was processed here. */
void flow_sample_rtt(flow *self, double rtt_s, double response_s) {
    if (rtt_s > 0) {
        self->rtt_min_s = self->rtt_min_s == 0 ? rtt_s : fmin(self->rtt_min_s, rtt_s);
        smooth(&self->view.smoothed_rtt_s, &self->view.rtt_variation_s, rtt_s);
    }
    if (response_s > 0)
        smooth(&self->response_s, &self->response_variation_s, response_s);
}

/* Return a packet's one-way delay, plus the clock offset; `arrived_us` is modulo 2^32. */
double flow_one_way_s(flow *self, uint32_t arrived_us, double sent_s) {
    uint32_t took_us = arrived_us - (uint32_t)microseconds(sent_s);
    if (self->clocks_us < 0)
        self->clocks_us = took_us;
    return (int32_t)(took_us - (uint32_t)self->clocks_us) * 1e-6;
}

/* How much later a packet may arrive than one sent after it. If retransmissions get lost, a queue stays full: earlier
 * retransmissions would only be dropped, too. */
double flow_reordering_s(const flow *self) {
    double rtt_s = self->view.smoothed_rtt_s > 0 ? self->view.smoothed_rtt_s : INITIAL_RTT_S;
    return fmin(rtt_s * self->disorder * self->backoff, PROBE_TIMEOUT_MAX_S);
}

/* How much later a packet may arrive than one sent after it, on the last one's path. */
double flow_lateness_s(const flow *self) {
    double longest_s = 0;
    for (int64_t i = 0; i < self->path_count; i++)
        if (self->paths[i].flying)
            longest_s = fmax(longest_s, self->paths[i].delay_s);
    return flow_reordering_s(self) + fmax(longest_s - self->paths[self->path_last].delay_s, 0);
}

/* How long an acknowledgement may take (RFC 9002, 6.2.1), including both hosts' processing time. */
double flow_probe_timeout_s(const flow *self) {
    if (self->local.out.bytes)
        return PROBE_TIMEOUT_MAX_S; /* memory loses nothing: the peer is only slow */
    if (self->view.smoothed_rtt_s == 0)
        return fmax(INITIAL_RTT_S, self->answered_s);
    double timeout_s = self->response_s + fmax(4 * self->response_variation_s, flow_reordering_s(self));
    for (int64_t i = 0; self->path_count > 1 && i < self->path_count; i++)
        if (self->paths[i].flying)
            timeout_s = fmax(timeout_s, 2 * self->paths[i].delay_s); /* a probe must not overtake its packets */
    return fmin(timeout_s, fmax(PROBE_TIMEOUT_MAX_S, 2 * self->view.smoothed_rtt_s));
}

/* How long a path may be silent while others are not, before it counts as stalled. */
double flow_stalled_s(const flow *self) {
    return flow_reordering_s(self) + 3 * flow_probe_timeout_s(self);
}
