/* SPDX-License-Identifier: Apache-2.0 */
/* Frames between network interfaces and rows of memory, many at a time, from a ring that the kernel fills (packet(7),
 * TPACKET_V2, which shows frames at once; version 3 waits until a block is full or a timer fires). */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "engine.h"
#include "packet.h"

enum { TOGETHER = 64 }; /* frames per system call; more gain nothing */
enum { TAKEN_MALFORMED, TAKEN_OVERSIZE };
enum { TAG_AT = 12, TAG_BYTES = 4 }; /* a VLAN tag follows both addresses */
enum { SENT_OVERSIZE, SENT_UNREACHABLE, SENT_FAILED };

static struct tpacket2_hdr *frame_at(const packet_ring *ring, int64_t frame) {
    int64_t block = frame / ring->frames_per_block, within = frame % ring->frames_per_block;
    return (struct tpacket2_hdr *)(ring->memory + block * ring->block_bytes + within * ring->frame_bytes);
}

/* Copy a frame into a row. The kernel has taken the VLAN tag out of a frame; put it back. */
static void copy_frame(uint8_t *row, const struct tpacket2_hdr *head, size_t length, size_t tag) {
    const uint8_t *frame = (const uint8_t *)head + head->tp_mac;
    if (tag) {
        memcpy(row, frame, TAG_AT);
        put16(row + TAG_AT, head->tp_status & TP_STATUS_VLAN_TPID_VALID ? head->tp_vlan_tpid : ETH_P_8021Q);
        put16(row + TAG_AT + 2, head->tp_vlan_tci);
        memcpy(row + TAG_AT + TAG_BYTES, frame + TAG_AT, length - TAG_AT - TAG_BYTES);
    } else {
        memcpy(row, frame, length);
    }
}

/* Copy up to `count` waiting frames into the rows listed in `slots`, in order, and return the ring's frames to the
 * kernel. `lengths` and `stamps_ns` (real time) are set for each; `others` counts frames that are too short or too
 * long. Return how many. */
int64_t dlcp_packets_take(packet_ring *ring, uint8_t *rows, int64_t row_bytes, const int64_t *slots, int64_t count,
                          int64_t *lengths, int64_t *stamps_ns, int64_t *others) {
    int64_t taken = 0;
    for (int64_t seen = 0; taken < count && seen < ring->frames; seen++) {
        struct tpacket2_hdr *head = frame_at(ring, ring->next);
        if (!(__atomic_load_n(&head->tp_status, __ATOMIC_ACQUIRE) & TP_STATUS_USER))
            break;
        int64_t tag = head->tp_status & TP_STATUS_VLAN_VALID ? TAG_BYTES : 0, length = (int64_t)head->tp_len + tag;
        if (head->tp_len < ring->frame_min) {
            others[TAKEN_MALFORMED]++;
        } else if (head->tp_len > ring->frame_max || length > row_bytes) {
            others[TAKEN_OVERSIZE]++;
        } else {
            copy_frame(rows + slots[taken] * row_bytes, head, (size_t)length, (size_t)tag);
            lengths[taken] = length;
            stamps_ns[taken] = (int64_t)head->tp_sec * 1000000000 + head->tp_nsec;
            taken++;
        }
        __atomic_store_n(&head->tp_status, TP_STATUS_KERNEL, __ATOMIC_RELEASE);
        ring->next = ring->next + 1 == ring->frames ? 0 : ring->next + 1;
    }
    return taken;
}

static int kind_of(int error) {
    if (error == EMSGSIZE)
        return SENT_OVERSIZE;
    return error == ENETDOWN || error == ENXIO || error == ENODEV ? SENT_UNREACHABLE : SENT_FAILED;
}

/* Send the rows listed in `slots`, in order and without waiting. Frames that cannot leave are skipped and counted in
 * `failures`. Return how many left, with their total size in `bytes`. */
int64_t dlcp_packets_send(int socket, const uint8_t *rows, int64_t row_bytes, const int64_t *slots,
                          const int64_t *lengths, int64_t count, int64_t *bytes, int64_t *failures) {
    struct mmsghdr messages[TOGETHER];
    struct iovec pieces[TOGETHER];
    memset(messages, 0, sizeof messages);
    for (int i = 0; i < TOGETHER; i++)
        messages[i].msg_hdr = (struct msghdr){.msg_iov = &pieces[i], .msg_iovlen = 1};
    int64_t sent = 0, done = 0;
    *bytes = 0;
    while (done < count) {
        int some = count - done < TOGETHER ? (int)(count - done) : TOGETHER;
        for (int i = 0; i < some; i++) {
            pieces[i].iov_base = (void *)(rows + slots[done + i] * row_bytes);
            pieces[i].iov_len = (size_t)lengths[done + i];
        }
        int left = sendmmsg(socket, messages, (unsigned)some, MSG_DONTWAIT);
        if (left > 0) {
            for (int i = 0; i < left; i++)
                *bytes += lengths[done + i];
            sent += left;
            done += left;
        } else if (errno != EINTR) {
            failures[kind_of(errno)]++;
            done++;
        }
    }
    return sent;
}
