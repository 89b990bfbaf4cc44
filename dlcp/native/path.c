/* SPDX-License-Identifier: Apache-2.0 */
/* The paths to a peer. Each has its own source port, so that a fabric that chooses among equal routes by addresses and
 * ports (ECMP) uses several of them.
 *
 * A flow has one window; its paths share it by weight. A path whose packets are later or marked more often than those
 * of the best one, or lost more often than those of most, loses weight, and regains it once they are not. So delays
 * become equal, as they do if each packet takes the path with the shortest expected wait. A path of little weight is
 * abandoned, and tried again after a while; its losses meanwhile affect neither other paths nor the window. A small
 * window uses few paths, since losses are found by later packets on the same path. Compare REPS (2407.21625), which
 * remembers good entropies, and PLB (SIGCOMM 2022), which changes them when packets are marked.
 */

#include <math.h>
#include <stdlib.h>

#include "path.h"

/* Allocate this many paths; return 0, or NO_MEMORY. */
int path_make(flow *self, int64_t count) {
    if (count <= self->path_count)
        return 0;
    path *paths = realloc(self->paths, (size_t)count * sizeof *paths);
    if (!paths)
        return NO_MEMORY;
    self->paths = paths;
    for (; self->path_count < count; self->path_count++) {
        path *one = &paths[self->path_count];
        *one = (path){.weight = 1, .patience_s = PATH_AGAIN_S};
        for (int queue = 0; queue < QUEUES; queue++)
            one->newest[queue] = one->newest_before[queue] = (newest){-1, -1};
    }
    return 0;
}

/* How many paths the window suffices for. */
static int64_t affordable(const flow *self) {
    double packets = fmin(self->view.window, (double)self->view.largest_window);
    return smaller(self->path_count, 1 + (int64_t)(packets / PATH_PACKETS));
}

static void try_again(path *one) {
    one->weight = PATH_LEAST;
    one->on_trial = true;
    one->delay_s = one->loss = one->marks = 0;
    one->judged = one->lost = one->marked = 0;
}

/* Choose the path of the next burst, the one with the fewest packets in flight for its weight, and limit the burst to
 * that path's share of the window. */
int64_t path_choose(flow *self, int64_t *limit, double now_s) {
    if (self->path_count == 1)
        return 0;
    int64_t best = 0, left = affordable(self);
    double least = INFINITY, weights = 0;
    for (int64_t i = 0; i < self->path_count && left; i++) {
        path *one = &self->paths[i];
        if (one->weight == 0) {
            if (now_s < one->again_s)
                continue;
            try_again(one);
        }
        left--;
        weights += one->weight;
        double load = (double)(one->flying + 1) / one->weight;
        /* Paths with the same load take turns. */
        if (load < least || (load == least && best <= self->path_last && i > self->path_last)) {
            best = i;
            least = load;
        }
    }
    double window = fmin(self->view.window, (double)self->view.largest_window);
    int64_t part = (int64_t)(window * self->paths[best].weight / weights);
    *limit = smaller(*limit, part > PATH_BURST ? part : PATH_BURST);
    return best;
}

/* The path for control packets about messages: the first that is not known to be bad. */
int64_t path_for_control(const flow *self) {
    for (int64_t i = 0; i < self->path_count; i++)
        if (self->paths[i].weight == 1)
            return i;
    return 0;
}

/* Send nothing on a path for a while, if there is another. */
void path_leave(flow *self, path *one, double now_s) {
    int others = 0;
    for (int64_t i = 0; i < self->path_count && !others; i++)
        others = &self->paths[i] != one && self->paths[i].weight > 0 && !self->paths[i].on_trial;
    one->on_trial = false;
    if (!others) {
        one->weight = PATH_LEAST;
        return;
    }
    one->weight = 0;
    one->again_s = now_s + one->patience_s;
    one->patience_s = fmin(one->patience_s * 2, PATH_AGAIN_MAX_S);
}

static int by_size(const void *one, const void *other) {
    double left = *(const double *)one, right = *(const double *)other;
    return (left > right) - (left < right);
}

/* Return the share of its weight that a path should keep, compared with the others, after losing a share `lost`;
 * negative: there are no others. Losses are compared with the others' median: a full queue loses many packets of one
 * path and then of another, and among many paths some are always spared. */
static double deserved(const flow *self, const path *one, double lost) {
    double delay_s = INFINITY, marks = INFINITY, losses[PATHS_MAX];
    int64_t others = 0;
    int64_t left = affordable(self);
    for (int64_t i = 0; i < self->path_count && left; i++) {
        const path *other = &self->paths[i];
        if (other->weight == 0)
            continue;
        left--;
        if (other == one || other->on_trial || other->delay_s == 0)
            continue;
        delay_s = fmin(delay_s, other->delay_s);
        losses[others++] = other->loss;
        marks = fmin(marks, other->marks);
    }
    if (!others)
        return -1;
    qsort(losses, (size_t)others, sizeof *losses, by_size);
    double kept = 1, slow_s = delay_s * PATH_SLOW + self->view.rtt_variation_s;
    double lossy = PATH_LOSSY + PATH_LOSSIER * losses[others / 2];
    if (one->loss > lossy && lost > lossy)
        kept = 0.5;
    if (one->delay_s > slow_s)
        kept = fmin(kept, fmax(0.5, slow_s / one->delay_s));
    if (one->marks > marks + PATH_MARKED)
        kept = fmin(kept, 1 - (one->marks - marks) / 2);
    return kept;
}

static void judge(flow *self, path *one, double lost, double now_s) {
    double kept = deserved(self, one, lost);
    if (kept < 0)
        return;
    if (kept < 1) {
        one->weight *= kept;
        if (one->on_trial || one->weight < PATH_LEAST)
            path_leave(self, one, now_s);
        return;
    }
    one->weight = fmin(1, one->weight + PATH_CALM);
    if (one->weight == 1) {
        one->on_trial = false;
        one->patience_s = PATH_AGAIN_S;
    }
}

/* Judge paths with enough feedback. */
void path_judge_all(flow *self, double now_s) {
    if (self->path_count == 1)
        return;
    double stalled_s = flow_stalled_s(self);
    for (uint64_t fresh = self->fresh_paths; fresh; fresh &= fresh - 1) {
        path *one = &self->paths[__builtin_ctzll(fresh)];
        if (one->weight > 0 && one->lost_in_row >= PATH_BURST && now_s - one->last_delivered_s > stalled_s)
            path_leave(self, one, now_s);
        if (one->judged < PATH_JUDGED)
            continue;
        double judged = (double)one->judged, lost = fmax((double)one->lost, 0) / judged;
        one->loss += (lost - one->loss) * PATH_LOSS_GAIN;
        one->marks += (fmin((double)one->marked / judged, 1) - one->marks) * PATH_GAIN;
        one->judged = one->lost = one->marked = 0;
        if (one->weight > 0)
            judge(self, one, lost, now_s);
    }
    self->fresh_paths = 0;
}

/* Add a round-trip sample of a path. */
void path_sample_delay(path *self, double delay_s) {
    self->delay_s = self->delay_s == 0 ? delay_s : self->delay_s + (delay_s - self->delay_s) * PATH_GAIN;
}
