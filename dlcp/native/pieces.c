/* SPDX-License-Identifier: Apache-2.0 */
/* Packets in pieces: cut by the sender, joined by the receiver. A lost piece loses its packet. A retransmission has the
 * same contents, so pieces of both transmissions join. */

#include <stdlib.h>

#include "pieces.h"

/* Write the piece of a packet that begins at this offset of its payload; return how many bytes of payload it has. */
int64_t piece_cut(const uint8_t *packet, int64_t bytes, int64_t piece_bytes, int64_t offset, uint8_t *piece) {
    int64_t total = bytes - HEADER_BYTES, room = (piece_bytes - PIECE_HEAD_BYTES) / PIECE_UNIT * PIECE_UNIT;
    int64_t size = smaller(room, total - offset);
    memcpy(piece, packet, HEADER_BYTES);
    piece[1] |= PIECE | PROTECTED; /* a switch that drops one by its policy would drop them all */
    piece[HEADER_BYTES] = packet[1];
    piece[HEADER_BYTES + 1] = 0;
    put16(piece + HEADER_BYTES + 2, (uint16_t)offset);
    put16(piece + HEADER_BYTES + 4, (uint16_t)total);
    memcpy(piece + HEADER_BYTES + PIECE_HEAD_BYTES, packet + HEADER_BYTES + offset, (size_t)size);
    return size;
}

static bool is_same(const assembly *one, const uint8_t *head, int64_t total) {
    if (one->total != total)
        return false;
    /* A retransmission differs in this flag. */
    return one->head[0] == head[0] && (one->head[1] | RETRANSMISSION) == (head[1] | RETRANSMISSION) &&
           !memcmp(one->head + 2, head + 2, HEADER_BYTES - 2);
}

/* Return the assembly of a packet, a new one in place of the oldest if there is none; NULL: no memory. */
static assembly *assembly_of(assembler *self, const uint8_t *head, int64_t total, int64_t payload_bytes) {
    if (!self->assemblies) {
        self->room = HEADER_BYTES + payload_bytes;
        self->assemblies = calloc(ASSEMBLIES, sizeof *self->assemblies);
        self->packets = malloc((size_t)(ASSEMBLIES * self->room));
        if (!self->assemblies || !self->packets) {
            piece_free(self);
            return NULL;
        }
    }
    for (int64_t i = 0; i < ASSEMBLIES; i++)
        if (is_same(&self->assemblies[i], head, total))
            return &self->assemblies[i];
    assembly *one = &self->assemblies[self->next];
    self->next = (self->next + 1) % ASSEMBLIES;
    memcpy(one->head, head, HEADER_BYTES);
    one->total = total;
    one->have = 0;
    memset(one->seen, 0, sizeof one->seen);
    return one;
}

/* Add a piece. Once all have arrived, return their packet, of `whole` bytes and valid until the next call; otherwise
 * NULL. */
const uint8_t *piece_join(assembler *self, const uint8_t *piece, int64_t bytes, int64_t payload_bytes, int64_t *whole,
                          bool *refused) {
    int64_t size = bytes - HEADER_BYTES - PIECE_HEAD_BYTES;
    *refused = true;
    if (size < 1)
        return NULL;
    int64_t offset = get16(piece + HEADER_BYTES + 2), total = get16(piece + HEADER_BYTES + 4);
    uint8_t head[HEADER_BYTES], flags = piece[HEADER_BYTES];
    if (flags & PIECE || piece[1] != (flags | PIECE | PROTECTED) || total > payload_bytes || size > total - offset ||
        offset % PIECE_UNIT || (size % PIECE_UNIT && offset + size < total))
        return NULL;
    *refused = false;
    memcpy(head, piece, HEADER_BYTES);
    head[1] = flags;
    assembly *one = assembly_of(self, head, total, payload_bytes);
    if (!one)
        return NULL;
    uint8_t *packet = self->packets + (one - self->assemblies) * self->room;
    for (int64_t at = 0; at < size; at += PIECE_UNIT) {
        int64_t unit = (offset + at) / PIECE_UNIT;
        if (has_bit(one->seen, unit))
            continue;
        set_bit(one->seen, unit);
        one->have += smaller(PIECE_UNIT, size - at);
    }
    memcpy(packet + HEADER_BYTES + offset, piece + HEADER_BYTES + PIECE_HEAD_BYTES, (size_t)size);
    if (one->have < total)
        return NULL;
    memcpy(packet, head, HEADER_BYTES);
    one->total = 0; /* a duplicate begins a new assembly */
    *whole = HEADER_BYTES + total;
    return packet;
}

void piece_free(assembler *self) {
    free(self->assemblies);
    free(self->packets);
    *self = (assembler){0};
}
