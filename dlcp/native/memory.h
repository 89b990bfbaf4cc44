/* SPDX-License-Identifier: Apache-2.0 */
/* Reusable large buffers, and copies that bypass the caches. */
#pragma once

#include <stdint.h>

enum { POOL_BUFFERS = 64 };

/* Freed buffers, up to a number and `limit` bytes. */
typedef struct {
    struct {
        uint8_t *memory;
        int64_t capacity;
    } kept[POOL_BUFFERS];
    int64_t limit;
} pool;

uint8_t *pool_take(pool *self, int64_t bytes);
void pool_give(pool *self, uint8_t *memory, int64_t bytes);
void pool_free(pool *self);
void memcpy_nt(uint8_t *into, const uint8_t *from, int64_t bytes);
void finish_memcpy_nt(void);
