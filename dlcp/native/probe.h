/* SPDX-License-Identifier: Apache-2.0 */
/* Probes for missing packets, and their answers. */
#pragma once

#include "tx.h"

void probe_send(io *io, flow *to, tx_message *self, double now_s);
double probe_due(io *io, flow *to, double now_s);
void probe_take_answer(io *io, flow *to, const uint8_t *datagram, int64_t bytes, double now_s);
