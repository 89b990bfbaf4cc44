/* SPDX-License-Identifier: Apache-2.0 */
/* Acknowledgements, out and in. */
#pragma once

#include "rx.h"

void ack_note_arrival(const io *io, flow *self, rx_message *message, int64_t index, int tos, double now_s);
void ack_forget(flow *self, const rx_message *message);
void ack_send(io *io, flow *self, double now_s);
void ack_send_whole(io *io, flow *self, rx_message *message, double now_s);
double ack_due(io *io, flow *flows, double now_s);
void ack_take(io *io, flow *self, const uint8_t *datagram, int64_t bytes, double now_s);
