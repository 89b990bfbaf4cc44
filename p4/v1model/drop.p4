// SPDX-License-Identifier: Apache-2.0

// Drops a packet if the queue is deeper than the threshold of its drop class, but never more of a message than this
// switch's part of the budget in its header. For a job with an entry in `trimming`, the packet is cut to its headers
// instead. In QUEUE_EXCESS, which holds traffic beyond a job's share, packets are dropped even after the budget is
// spent: otherwise they would fill the queue, and it would tail-drop later packets of every class. Job, step, message
// and sender identify a message. Their 32-bit hash is the slot's owner; its low bits are the slot's index.
control SelectiveDrop(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    register<bit<32>, bit<32>>(SLOT_REGISTER_SIZE) slot_owner;
    register<bit<32>, bit<32>>(SLOT_REGISTER_SIZE) slot_used_us;
    register<bit<16>, bit<32>>(SLOT_REGISTER_SIZE) slot_spent;

    bit<19> limit = 0;
    bit<16> budget = 0;

    action drop_above(bit<19> depth) {
        limit = depth;
    }

    action part_of_budget(bit<4> halvings) {
        budget = hdr.dlcp.budget >> halvings;
    }

    // All switches that a message crosses may together drop its budget. The control plane gives each its part.
    table budget_part {
        key = { hdr.dlcp.job: ternary @name("job"); }
        actions = { part_of_budget; }
        const default_action = part_of_budget(0);
        size = BUDGET_TABLE_SIZE;
    }

    action trim() {
        meta.trimmed = 1;
    }

    table trimming {
        key = { hdr.dlcp.job: exact @name("job"); }
        actions = { trim; @defaultonly NoAction; }
        const default_action = NoAction();
        size = TRIMMING_TABLE_SIZE;
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

    apply {
        if (drop_threshold.apply().hit) {
            bit<19> depth;
            queue_depth.read(depth, DEPTH_INDEX(std.egress_spec, meta.queue));
            if (depth > limit) {
                bit<32> owner;
                hash(owner, HashAlgorithm.crc32, 32w0,
                     { hdr.dlcp.job, hdr.dlcp.step, hdr.dlcp.message, hdr.dlcp.sender }, 64w0x100000000);
                bit<32> slot = (bit<32>)owner[SLOT_WIDTH - 1:0];
                owner = owner | SLOT_OWNED;
                bit<32> now_us = (bit<32>)std.ingress_global_timestamp;
                bit<32> slot_holder;
                bit<32> used_us;
                bit<16> spent;
                slot_owner.read(slot_holder, slot);
                slot_used_us.read(used_us, slot);
                slot_spent.read(spent, slot);
                if (slot_holder != owner && (slot_holder == 0 || now_us - used_us > SLOT_IDLE_US)) {
                    slot_holder = owner;
                    spent = 0;
                    slot_owner.write(slot, owner);
                }
                bit<3> event = EVENT_SLOT_TAKEN;
                if (slot_holder == owner) {
                    event = EVENT_BUDGET_SPENT;
                    budget_part.apply();
                    if (spent < budget) {
                        spent = spent + 1;
                        event = EVENT_POLICY_DROP;
                    }
                    slot_used_us.write(slot, now_us);
                    slot_spent.write(slot, spent);
                }
                if (meta.queue == QUEUE_EXCESS) {
                    event = EVENT_POLICY_DROP;
                }
                if (event == EVENT_POLICY_DROP) {
                    meta.refused = 1;
                    // Beyond the share, what is left of packets would fill the queue for control packets.
                    if (meta.queue != QUEUE_EXCESS && trimming.apply().hit) {
                        meta.refused = 0;
                        event = EVENT_TRIMMED;
                    }
                }
                ingress_events.count(EVENT_INDEX(std.egress_spec, meta.queue, meta.drop_class, event));
                if (meta.trimmed == 1) {
                    meta.queue = QUEUE_CONTROL;
                }
            }
        }
    }
}
