/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of encoded values, packet by packet (planes.c). */
#pragma once

#include "engine.h"

void planes_combine(const plane_layout *layout, const plane_sum *sum, int64_t packet, const uint8_t *const *codes,
                    const uint64_t *lower_missing, int64_t members);
