// SPDX-License-Identifier: Apache-2.0

// Hosts write their own tags, so tags are used only if they arrive on a port that the operator trusts. On other ports
// they are cleared, so that this switch and every later one treat the packet as ordinary traffic.
control PortTrust(inout headers_t hdr, inout metadata_t meta) {
    Counter<bit<64>, class_index_t>(CLASS_COUNTER_SIZE, CounterType_t.PACKETS_AND_BYTES) untrusted_events;
    Hash<class_index_t>(HashAlgorithm_t.IDENTITY) index;

    action trust() {
        meta.tagged = 1;
    }

    action clear_tags() {
        meta.tagged = 0;
    }

    table port_trust {
        key = { meta.ig.port: exact @name("ig_port"); }
        actions = { trust; clear_tags; }
        const default_action = clear_tags();
        size = TRUST_TABLE_SIZE;
    }

    apply {
        port_trust.apply();
        if (meta.tagged == 0) {
            untrusted_events.count(
                index.get({ meta.ig.port[PORT_INDEX_WIDTH - 1:0], hdr.dlcp.queue, hdr.dlcp.drop_class }));
            if (hdr.ipv4.isValid()) {
                hdr.ipv4.dscp = 0;
            } else {
                hdr.ipv6.dscp = 0;
            }
            if (hdr.vlan.isValid()) {
                hdr.vlan.pcp = 0;
            }
            hdr.dlcp.queue = QUEUE_ORDINARY;
            hdr.dlcp.drop_class = CLASS_NEVER;
            // 0 means that the sender computed no checksum. The deparser updates it.
            if (hdr.udp.checksum != 0) {
                meta.cleared = true;
            }
        }
    }
}

// Limits a job to its share of a port. Traffic beyond the share goes to the lowest queue, below ordinary traffic, and
// is sent only when the port would otherwise be idle. Control packets have their own share, so that a burst of
// gradients cannot delay the control packets that end it.
control JobShare(inout headers_t hdr, inout metadata_t meta) {
    DirectMeter(MeterType_t.BYTES) share_meter;
    Counter<bit<64>, class_index_t>(CLASS_COUNTER_SIZE, CounterType_t.PACKETS_AND_BYTES) share_events;
    Hash<class_index_t>(HashAlgorithm_t.IDENTITY) index;

    action metered() {
        meta.color = (bit<2>)share_meter.execute();
    }

    action unlimited() {
        meta.color = METER_GREEN;
    }

    table job_share {
        key = {
            hdr.dlcp.job: exact @name("job");
            meta.is_control: exact @name("control");
            meta.eg_port: exact @name("eg_port");
        }
        actions = { metered; @defaultonly unlimited; }
        const default_action = unlimited();
        meters = share_meter;
        size = SHARE_TABLE_SIZE;
    }

    apply {
        job_share.apply();
        if (meta.color != METER_GREEN) {
            share_events.count(index.get({ meta.eg_port[PORT_INDEX_WIDTH - 1:0], meta.queue, meta.drop_class }));
            meta.queue = QUEUE_EXCESS;
        }
    }
}
