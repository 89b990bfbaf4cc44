// SPDX-License-Identifier: Apache-2.0

// Drops the least valuable packets of a queue that is too deep, never more of one message than its header allows here.
// Only in the queue for what exceeds a job's share, where a place is nobody's due, they are dropped whatever their message
// has lost: else the queue would be full of them, and lose what comes next, of any value.
// A message is known by job, step, message and sender; one 32-bit hash of them owns the slot that its low bits name.
control SelectiveDrop(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    register<bit<32>, bit<32>>(SLOT_REGISTER_SIZE) slot_owner;
    register<bit<32>, bit<32>>(SLOT_REGISTER_SIZE) slot_used_us;
    register<bit<16>, bit<32>>(SLOT_REGISTER_SIZE) slot_spent;

    bit<19> limit = 0;

    action drop_above(bit<19> depth) {
        limit = depth;
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
                    if (spent < hdr.dlcp.budget) {
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
                }
                ingress_events.count(EVENT_INDEX(std.egress_spec, meta.queue, meta.drop_class, event));
            }
        }
    }
}
