/* SPDX-License-Identifier: Apache-2.0 */
/* A hash table of messages. */
#pragma once

#include <stdint.h>

/* Identity of a message; the first member of every table entry. */
typedef struct msg_id msg_id;
struct msg_id {
    int64_t peer, step, message;
    msg_id *next; /* in its hash chain */
};

typedef struct {
    msg_id **chains;
    int64_t chain_count;
} table;

int table_make(table *self, int64_t chains);
msg_id *table_find(const table *self, int64_t peer, int64_t step, int64_t message);
void table_add(table *self, msg_id *one);
void table_remove(table *self, const msg_id *one);
