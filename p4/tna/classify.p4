// SPDX-License-Identifier: Apache-2.0

// Takes queue and drop class from the packet's tags, unless an entry overrides them for a job, packet type or tag.
control Classify(inout headers_t hdr, inout metadata_t meta) {
    action as_tagged() {
        meta.queue = hdr.dlcp.queue;
        meta.drop_class = hdr.dlcp.drop_class;
    }

    action set_class(bit<3> queue, bit<3> drop_class) {
        meta.queue = queue;
        meta.drop_class = drop_class;
    }

    table classify {
        key = {
            hdr.dlcp.job: ternary @name("job");
            hdr.dlcp.type: ternary @name("type");
            hdr.dlcp.queue: ternary @name("queue");
            hdr.dlcp.drop_class: ternary @name("drop_class");
        }
        actions = { as_tagged; set_class; }
        const default_action = as_tagged();
        size = CLASSIFY_TABLE_SIZE;
    }

    apply {
        classify.apply();
    }
}
