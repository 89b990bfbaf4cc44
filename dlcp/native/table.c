/* SPDX-License-Identifier: Apache-2.0 */
/* A hash table of messages. */

#include <stdlib.h>

#include "engine.h"
#include "table.h"

/* Make an empty table with this many chains, a power of two; return 0, or NO_MEMORY. */
int table_make(table *self, int64_t chains) {
    self->chains = calloc((size_t)chains, sizeof(msg_id *));
    self->chain_count = self->chains ? chains : 0;
    return self->chains ? 0 : NO_MEMORY;
}

static msg_id **chain_of(const table *self, int64_t peer, int64_t step, int64_t message) {
    uint64_t mixed = ((uint64_t)step << 32 ^ (uint64_t)message << 16 ^ (uint64_t)peer) * 0x9E3779B97F4A7C15ull;
    return &self->chains[(int64_t)(mixed >> 40) & (self->chain_count - 1)];
}

/* Return the message that was added first under an identity; NULL: none. */
msg_id *table_find(const table *self, int64_t peer, int64_t step, int64_t message) {
    msg_id *one = *chain_of(self, peer, step, message);
    while (one && (one->peer != peer || one->step != step || one->message != message))
        one = one->next;
    return one;
}

void table_add(table *self, msg_id *one) {
    msg_id **link = chain_of(self, one->peer, one->step, one->message);
    while (*link)
        link = &(*link)->next;
    *link = one;
}

void table_remove(table *self, const msg_id *one) {
    msg_id **link = chain_of(self, one->peer, one->step, one->message);
    while (*link && *link != one)
        link = &(*link)->next;
    if (*link)
        *link = one->next;
}
