/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers of loops that the compiler vectorizes. */
#pragma once

#include <stdint.h>
#include <string.h>

/* A second version of a function for AVX2, chosen at load time; requires the GNU C library. The code that chooses runs
 * before the thread sanitizer is ready. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) &&                                      \
    (!defined(__clang__) || __clang_major__ >= 14)
#define FASTEST __attribute__((target_clones("avx2", "default")))
#else
#define FASTEST
#endif
#define INLINED static inline __attribute__((always_inline))

INLINED float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINED uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
