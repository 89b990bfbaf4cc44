/* SPDX-License-Identifier: Apache-2.0 */
/* The paths to a peer. */
#pragma once

#include "flow.h"

int path_make(flow *self, int64_t count);
int64_t path_choose(flow *self, int64_t *limit, double now_s);
int64_t path_for_control(const flow *self);
void path_leave(flow *self, path *one, double now_s);
void path_judge_all(flow *self, double now_s);
void path_sample_delay(path *self, double delay_s);
