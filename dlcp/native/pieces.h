/* SPDX-License-Identifier: Apache-2.0 */
/* Packets in pieces, for a path that has become too narrow for them, without an ICMP message. */
#pragma once

#include "packet.h"

/* A piece has its packet's header, with PIECE and PROTECTED. It is followed by the packet's flags and a zero, a byte
 * each, and by the piece's offset in the packet's payload and the length of that payload, two bytes each. Offsets are
 * multiples of PIECE_UNIT. */
enum { PIECE = 0x08, PIECE_HEAD_BYTES = 6, PIECE_UNIT = 8 };
/* Packets that have arrived in part, per peer. A burst's pieces follow each other, so only losses and other paths
 * leave several incomplete. */
enum { ASSEMBLIES = 32 };

typedef struct {
    uint8_t head[HEADER_BYTES]; /* of the packet */
    int64_t total, have;        /* bytes of its payload */
    uint64_t seen[DATAGRAM_MAX / PIECE_UNIT / 64];
} assembly;

typedef struct {
    assembly *assemblies; /* NULL until a piece arrives */
    uint8_t *packets;     /* for each, header and payload */
    int64_t room;         /* bytes of one of these */
    int64_t next;         /* the assembly to give up next */
} assembler;

int64_t piece_cut(const uint8_t *packet, int64_t bytes, int64_t piece_bytes, int64_t offset, uint8_t *piece);
const uint8_t *piece_join(assembler *self, const uint8_t *piece, int64_t bytes, int64_t payload_bytes, int64_t *whole,
                          bool *refused);
void piece_free(assembler *self);
