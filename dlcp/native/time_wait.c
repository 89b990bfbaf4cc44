/* SPDX-License-Identifier: Apache-2.0 */
/* The state kept of complete messages, to tell their senders that no more is needed. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "time_wait.h"

/* Stop notifying the sender. */
static void settle(receiver *rx, rx_time_wait *self) {
    if (self->state == TIME_WAIT_STOPPING) {
        *(self->earlier_stopping ? &self->earlier_stopping->later_stopping : &rx->first_stopping) =
            self->later_stopping;
        *(self->later_stopping ? &self->later_stopping->earlier_stopping : &rx->last_stopping) = self->earlier_stopping;
        rx->io->view.stopping_count--;
        free(self->unconfirmed);
    }
    self->state = TIME_WAIT_KNOWN;
}

void time_wait_free(receiver *rx, rx_time_wait *self) {
    settle(rx, self);
    table_remove(&rx->time_wait, &self->id);
    *(self->older ? &self->older->newer : &rx->oldest) = self->newer;
    *(self->newer ? &self->newer->older : &rx->newest) = self->older;
    free(self);
}

/* Repeat the STOP for those parts of a message that its sender has not acknowledged. */
void time_wait_stop(const receiver *rx, rx_time_wait *self, double now_s) {
    int64_t span = io_bitmap_packets(rx->io), bytes = (self->packets + 7) / 8;
    for (int64_t part = 0; part < self->parts; part++) {
        if (!self->unconfirmed[part])
            continue;
        int64_t start = part * span / 8, size = self->bitmap ? smaller(bytes - start, span / 8) : 0;
        io_send_control(rx->io, self->from, STOP, &self->id, part * span, self->packets,
                        self->bitmap ? self->bitmap + start : NULL, size);
    }
    self->due_s = now_s + self->repeat_s;
    self->repeat_s = fmin(STOP_REPEAT_MAX_S, self->repeat_s * 2);
}

/* Notify a sender until it acknowledges; `bits` are the arrived packets, NULL if all. */
int time_wait_begin_stop(receiver *rx, rx_time_wait *self, const uint64_t *bits, double now_s, double give_up_s) {
    int64_t span = io_bitmap_packets(rx->io), parts = bits ? (self->packets + span - 1) / span : 1;
    self->unconfirmed = malloc((size_t)(parts + (self->packets + 7) / 8));
    if (!self->unconfirmed)
        return NO_MEMORY;
    memset(self->unconfirmed, 1, (size_t)parts);
    self->bitmap = bits ? self->unconfirmed + parts : NULL;
    if (bits)
        put_bitmap(self->bitmap, bits, 0, self->packets);
    self->parts = self->unconfirmed_count = parts;
    self->give_up_s = give_up_s;
    self->repeat_s = flow_probe_timeout_s(self->from);
    self->state = TIME_WAIT_STOPPING;
    self->later_stopping = NULL;
    self->earlier_stopping = rx->last_stopping;
    *(rx->last_stopping ? &rx->last_stopping->later_stopping : &rx->first_stopping) = self;
    rx->last_stopping = self;
    rx->io->view.stopping_count++;
    time_wait_stop(rx, self, now_s);
    return 0;
}

void time_wait_tell_whole(const receiver *rx, const rx_time_wait *self) {
    io_send_control(rx->io, self->from, STOP, &self->id, 0, self->packets, NULL, 0);
}

rx_time_wait *time_wait_find(const receiver *rx, const flow *from, int64_t step, int64_t message) {
    return (rx_time_wait *)table_find(&rx->time_wait, from->peer, step, message);
}

/* Record that a message is complete; NULL: no memory. */
rx_time_wait *time_wait_add(receiver *rx, const rx_message *message, double now_s) {
    rx_time_wait *self = time_wait_find(rx, message->from, message->id.step, message->id.message);
    if (self)
        time_wait_free(rx, self);
    self = calloc(1, sizeof *self);
    if (!self) {
        rx->io->view.failed = true; /* or late packets would start it again */
        return NULL;
    }
    self->id = (msg_id){message->id.peer, message->id.step, message->id.message, NULL};
    self->from = message->from;
    self->state = TIME_WAIT_KNOWN;
    self->packets = message->packets;
    self->completed_s = now_s;
    self->older = rx->newest;
    *(self->older ? &self->older->newer : &rx->oldest) = self;
    rx->newest = self;
    table_add(&rx->time_wait, &self->id);
    return self;
}

/* Repeat unacknowledged STOPs; return when to do so next. */
double time_wait_repeat(receiver *rx, double now_s) {
    double due_s = INFINITY;
    rx_time_wait *next = NULL;
    for (rx_time_wait *self = rx->first_stopping; self; self = next) {
        next = self->later_stopping;
        if (now_s >= self->give_up_s) {
            settle(rx, self);
            continue;
        }
        if (now_s >= self->due_s)
            time_wait_stop(rx, self, now_s);
        due_s = sooner(due_s, sooner(self->due_s, self->give_up_s));
    }
    return due_s;
}

/* Forget a complete message, for which no more packets will come. */
void time_wait_forget(receiver *rx, const flow *from, int64_t step, int64_t message) {
    rx_time_wait *self = time_wait_find(rx, from, step, message);
    if (self && self->state != TIME_WAIT_STOPPING)
        time_wait_free(rx, self);
}

/* Forget complete messages of steps before `step`. */
void time_wait_forget_steps(receiver *rx, int64_t step, double now_s) {
    /* A sender that missed our acknowledgement may still probe, but not after twice the tolerated silence. */
    double asked_since_s = now_s - 2 * rx->io->config.silence_s;
    rx_time_wait *next = NULL;
    for (rx_time_wait *self = rx->oldest; self && self->id.step < step; self = next) {
        next = self->newer;
        if (self->state == TIME_WAIT_WHOLE && self->completed_s > asked_since_s)
            break; /* the rest are newer */
        if (self->state != TIME_WAIT_STOPPING)
            time_wait_free(rx, self);
    }
}

/* Remind senders of complete messages, briefly or until they acknowledge: this rank will soon be gone. */
void time_wait_remind(receiver *rx, double now_s) {
    for (rx_time_wait *self = rx->oldest; self; self = self->newer) {
        if (self->state != TIME_WAIT_WHOLE)
            continue;
        self->state = TIME_WAIT_KNOWN;
        if (self->completed_s > now_s - KNOWN_AFTER_S)
            time_wait_begin_stop(rx, self, NULL, now_s, now_s + REMIND_S);
    }
}

/* Record that a sender has acknowledged one part of a STOP. */
void time_wait_take_ack(receiver *rx, const flow *from, const uint8_t *datagram) {
    rx_time_wait *done = time_wait_find(rx, from, header_step(datagram), header_message(datagram));
    if (!done)
        return;
    if (done->state == TIME_WAIT_WHOLE)
        done->state = TIME_WAIT_KNOWN;
    if (done->state != TIME_WAIT_STOPPING)
        return;
    int64_t part = header_index(datagram) / io_bitmap_packets(rx->io);
    if (header_index(datagram) % io_bitmap_packets(rx->io) || part >= done->parts || !done->unconfirmed[part])
        return;
    done->unconfirmed[part] = 0;
    if (--done->unconfirmed_count == 0)
        settle(rx, done);
}
