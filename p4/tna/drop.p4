// SPDX-License-Identifier: Apache-2.0

struct slot_t {
    int<32> owner;
    int<32> used_ticks; // signed, so that differences stay correct when the clock wraps around
}

// Colours a packet red if the queue is deeper than the threshold of its drop class, but never more of one message than
// this switch's part of the budget in its header. The traffic manager drops red packets if the queue is still deep when
// they reach it. In QUEUE_EXCESS every droppable packet is coloured red: while other queues are served, no packet leaves
// that queue, so egress cannot report its depth; the traffic manager knows it anyway. Job, step, message and sender
// identify a message. Their 32-bit hash is the slot's owner; its low bits are the slot's index.
control SelectiveDrop(inout headers_t hdr, inout metadata_t meta, in ingress_intrinsic_metadata_t ig) {
    Hash<bit<32>>(HashAlgorithm_t.CRC32) owner_hash;
    Register<slot_t, slot_index_t>(SLOT_REGISTER_SIZE) slot_owner;
    Register<bit<16>, slot_index_t>(SLOT_REGISTER_SIZE) slot_spent;

    // The packet's queue, or the one that the report is about.
    depth_index_t queue = 0;
    bit<32> cells = 0; // the threshold, or the reported depth
    bit<1> known = 0;
    bit<1> deeper = 0;
    bit<32> owner = 0;
    bit<32> now_ticks = 0;

    RegisterAction<bit<32>, depth_index_t, bit<1>>(queue_depth) is_deeper = {
        void apply(inout bit<32> depth_cells, out bit<1> above) {
            above = 0;
            if (depth_cells > cells) {
                above = 1;
            }
        }
    };

    RegisterAction<bit<32>, depth_index_t, bit<1>>(queue_depth) set_depth = {
        void apply(inout bit<32> depth_cells) {
            depth_cells = cells;
        }
    };

    // Claims the slot if it is ours or idle, and returns which of the two it was.
    RegisterAction<slot_t, slot_index_t, bit<8>>(slot_owner) claim = {
        void apply(inout slot_t slot, out bit<8> found) {
            found = this.predicate(
                slot.owner == (int<32>)owner, (int<32>)now_ticks - slot.used_ticks > SLOT_IDLE_TICKS);
            if (slot.owner == (int<32>)owner || (int<32>)now_ticks - slot.used_ticks > SLOT_IDLE_TICKS) {
                slot.owner = (int<32>)owner;
                slot.used_ticks = (int<32>)now_ticks;
            }
        }
    };

    RegisterAction<bit<16>, slot_index_t, bit<1>>(slot_spent) spend = {
        void apply(inout bit<16> spent, out bit<1> granted) {
            granted = 0;
            if (spent < meta.budget) {
                spent = spent + 1;
                granted = 1;
            }
        }
    };

    RegisterAction<bit<16>, slot_index_t, bit<16>>(slot_spent) spend_first = {
        void apply(inout bit<16> spent, out bit<16> granted) {
            if (meta.budget > 0) {
                spent = 1;
            } else {
                spent = 0;
            }
            granted = spent;
        }
    };

    action drop_above(bit<19> depth) {
        cells = (bit<32>)depth;
    }

    table drop_threshold {
        key = {
            meta.queue: exact @name("queue");
            meta.drop_class: exact @name("drop_class");
        }
        actions = { drop_above; @defaultonly NoAction; }
        const default_action = NoAction();
        size = THRESHOLD_TABLE_SIZE;
    }

    // A Tofino shifts by constants only.
    action all_of_budget() {
        meta.budget = hdr.dlcp.budget;
    }

    action half_of_budget() {
        meta.budget = hdr.dlcp.budget >> 1;
    }

    action quarter_of_budget() {
        meta.budget = hdr.dlcp.budget >> 2;
    }

    action eighth_of_budget() {
        meta.budget = hdr.dlcp.budget >> 3;
    }

    action sixteenth_of_budget() {
        meta.budget = hdr.dlcp.budget >> 4;
    }

    action thirtysecond_of_budget() {
        meta.budget = hdr.dlcp.budget >> 5;
    }

    action sixtyfourth_of_budget() {
        meta.budget = hdr.dlcp.budget >> 6;
    }

    // All switches that a message crosses may together drop its budget. The control plane gives each its part.
    table budget_part {
        key = { hdr.dlcp.job: ternary @name("job"); }
        actions = {
            all_of_budget;
            half_of_budget;
            quarter_of_budget;
            eighth_of_budget;
            sixteenth_of_budget;
            thirtysecond_of_budget;
            sixtyfourth_of_budget;
        }
        const default_action = all_of_budget();
        size = BUDGET_TABLE_SIZE;
    }

    action remember() {
        set_depth.execute(queue);
    }

    action compare() {
        deeper = is_deeper.execute(queue);
    }

    // One table for packets and reports, because a register takes one address and one operand per pass.
    table depth_of_queue {
        key = { hdr.report.isValid(): exact @name("report"); }
        actions = { remember; compare; }
        const entries = {
            true: remember();
            false: compare();
        }
        size = 2;
    }

    apply {
        // Computed first and unconditionally, because without dependencies it needs no additional stage.
        owner = owner_hash.get({ hdr.dlcp.job, hdr.dlcp.step, hdr.dlcp.message, hdr.dlcp.sender });
        now_ticks = ig.ingress_mac_tstamp[47:16];
        budget_part.apply();
        if (hdr.report.isValid()) {
            queue = hdr.report.queue[DEPTH_INDEX_WIDTH - 1:0];
            cells = hdr.report.depth_cells;
            known = 1;
        } else if (meta.may_drop == 1) {
            queue = meta.eg_port[PORT_INDEX_WIDTH - 1:0] ++ meta.queue;
            if (drop_threshold.apply().hit) {
                if (meta.queue == QUEUE_EXCESS) {
                    meta.excess = 1;
                } else {
                    known = 1;
                }
            }
        }
        if (known == 1) {
            depth_of_queue.apply();
        }
        if (deeper == 1) {
            slot_index_t slot = owner[SLOT_WIDTH - 1:0];
            bit<8> found = claim.execute(slot);
            meta.counted = 1;
            meta.event_port = meta.eg_port[PORT_INDEX_WIDTH - 1:0];
            if (found == SLOT_OF_ANOTHER) {
                meta.event = EVENT_SLOT_TAKEN;
            } else {
                if (found == SLOT_FREE) {
                    meta.droppable = (bit<1>)spend_first.execute(slot);
                } else {
                    meta.droppable = spend.execute(slot);
                }
                if (meta.droppable == 1) {
                    meta.event = EVENT_POLICY_DROP;
                } else {
                    meta.event = EVENT_BUDGET_SPENT;
                }
            }
        }
    }
}
