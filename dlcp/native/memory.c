/* SPDX-License-Identifier: Apache-2.0 */
/* Reusable large buffers, and copies that bypass the caches. */

#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "memory.h"

/* The C library returns larger blocks to the kernel, and gets them back as fresh pages, which cost as much as
 * processing their contents. It reuses smaller ones by itself (M_MMAP_THRESHOLD of glibc). */
enum { POOL_MIN_BYTES = 128 << 10 };

/* Round a size up by at most an eighth: shards of a bucket differ by a packet, and share buffers. */
static int64_t capacity_for(int64_t bytes) {
    int64_t step = 1;
    while (step * 16 <= bytes)
        step *= 2;
    return (bytes + step - 1) / step * step;
}

/* Return a buffer; NULL: no memory. */
uint8_t *pool_take(pool *self, int64_t bytes) {
    int64_t capacity = capacity_for(bytes);
    for (int i = 0; i < POOL_BUFFERS && capacity >= POOL_MIN_BYTES; i++)
        if (self->kept[i].capacity == capacity) {
            self->kept[i].capacity = 0;
            return self->kept[i].memory;
        }
    return malloc((size_t)capacity);
}

/* Keep a buffer of this many bytes to be taken again, in place of the smallest one if there are too many. */
void pool_give(pool *self, uint8_t *memory, int64_t bytes) {
    int64_t capacity = capacity_for(bytes), kept = capacity;
    int place = 0; /* an empty one, or the smallest */
    for (int i = 0; i < POOL_BUFFERS && capacity >= POOL_MIN_BYTES; i++) {
        kept += self->kept[i].capacity;
        if (self->kept[i].capacity < self->kept[place].capacity)
            place = i;
    }
    int64_t smallest = self->kept[place].capacity;
    if (capacity < POOL_MIN_BYTES || smallest > capacity || kept - smallest > self->limit) {
        free(memory);
        return;
    }
    if (smallest)
        free(self->kept[place].memory);
    self->kept[place].memory = memory;
    self->kept[place].capacity = capacity;
}

void pool_free(pool *self) {
    for (int i = 0; i < POOL_BUFFERS; i++)
        if (self->kept[i].capacity)
            free(self->kept[i].memory);
}

#ifdef __SSE2__
/* Copy past the caches, without reading the destination first. */
void memcpy_nt(uint8_t *into, const uint8_t *from, int64_t bytes) {
    int64_t head = -(intptr_t)into & 15, done = head < bytes ? head : bytes;
    memcpy(into, from, (size_t)done);
    for (; done + 16 <= bytes; done += 16)
        _mm_stream_si128((__m128i *)(into + done), _mm_loadu_si128((const __m128i *)(from + done)));
    memcpy(into + done, from + done, (size_t)(bytes - done));
}

/* Make these copies visible to other threads before any later write. */
void finish_memcpy_nt(void) {
    _mm_sfence();
}
#else
void memcpy_nt(uint8_t *into, const uint8_t *from, int64_t bytes) {
    memcpy(into, from, (size_t)bytes);
}

void finish_memcpy_nt(void) {
}
#endif
