/* SPDX-License-Identifier: Apache-2.0 */
/* Everything in flight to one peer: what may leave, and what is lost. */
#pragma once

#include "tx.h"

bool flight_next_burst(io *io, flow *self, burst *into, double now_s);
void flight_note_sent(flow *self, const burst *sent, double now_s);
double flight_resumes_s(const flow *self, double now_s);
double flight_find_overtaken(flow *self, double now_s);
void flight_feed_back(flow *self, int64_t delivered, int64_t marked, int64_t lost, double now_s);
double flight_report(io *io, flow *flows, double now_s);
void flight_free(flow *self);
