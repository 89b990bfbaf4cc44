/* SPDX-License-Identifier: Apache-2.0 */
/* The state kept of a message once it is complete. */
#pragma once

#include "rx.h"

rx_time_wait *time_wait_find(const receiver *rx, const flow *from, int64_t step, int64_t message);
rx_time_wait *time_wait_add(receiver *rx, const rx_message *message, double now_s);
void time_wait_free(receiver *rx, rx_time_wait *self);
int time_wait_begin_stop(receiver *rx, rx_time_wait *self, const uint64_t *bits, double now_s, double give_up_s);
void time_wait_stop(const receiver *rx, rx_time_wait *self, double now_s);
void time_wait_tell_whole(const receiver *rx, const rx_time_wait *self);
double time_wait_repeat(receiver *rx, double now_s);
void time_wait_forget(receiver *rx, const flow *from, int64_t step, int64_t message);
void time_wait_forget_steps(receiver *rx, int64_t step, double now_s);
void time_wait_remind(receiver *rx, double now_s);
void time_wait_take_ack(receiver *rx, const flow *from, const uint8_t *datagram);
