// SPDX-License-Identifier: Apache-2.0

// Hosts write their own tags, so tags are used only if they arrive on a port that the operator trusts. On other ports
// they are cleared, so that this switch and every later one treat the packet as ordinary traffic.
control PortTrust(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    action trust() {
        meta.tagged = 1;
    }

    action clear_tags() {
        meta.tagged = 0;
    }

    table port_trust {
        key = { std.ingress_port: exact @name("ig_port"); }
        actions = { trust; clear_tags; }
        const default_action = clear_tags();
        size = TRUST_TABLE_SIZE;
    }

    apply {
        port_trust.apply();
        if (meta.tagged == 0) {
            ingress_events.count(EVENT_INDEX(std.ingress_port, hdr.dlcp.queue, hdr.dlcp.drop_class, EVENT_UNTRUSTED));
            bit<16> before = hdr.dlcp.queue ++ hdr.dlcp.drop_class ++ hdr.dlcp.spare ++ hdr.dlcp.layer;
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
            // A switch does not parse the payload, so it updates the checksum incrementally (RFC 1624). 0 means that
            // the sender computed no checksum.
            if (hdr.udp.checksum != 0) {
                bit<16> after = QUEUE_ORDINARY ++ CLASS_NEVER ++ hdr.dlcp.spare ++ hdr.dlcp.layer;
                bit<32> sum = (bit<32>)(~hdr.udp.checksum) + (bit<32>)(~before) + (bit<32>)after;
                sum = (sum & 0xFFFF) + (sum >> 16);
                sum = (sum & 0xFFFF) + (sum >> 16);
                hdr.udp.checksum = ~sum[15:0];
                if (hdr.udp.checksum == 0) {
                    hdr.udp.checksum = 0xFFFF;
                }
            }
        }
    }
}

// Limits a job to its share of a port. Traffic beyond the share goes to the lowest queue, below ordinary traffic, and
// is sent only when the port would otherwise be idle. Control packets have their own share, so that a burst of
// gradients cannot delay the control packets that end it.
control JobShare(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t std) {
    direct_meter<bit<2>>(MeterType.bytes) share_meter;

    action metered() {
        share_meter.read(meta.color);
    }

    action unlimited() {
        meta.color = METER_GREEN;
    }

    table job_share {
        key = {
            hdr.dlcp.job: exact @name("job");
            meta.is_control: exact @name("control");
            std.egress_spec: exact @name("eg_port");
        }
        actions = { metered; unlimited; }
        const default_action = unlimited();
        meters = share_meter;
        size = SHARE_TABLE_SIZE;
    }

    apply {
        job_share.apply();
        if (meta.color != METER_GREEN) {
            ingress_events.count(EVENT_INDEX(std.egress_spec, meta.queue, meta.drop_class, EVENT_OVER_SHARE));
            meta.queue = QUEUE_EXCESS;
        }
    }
}
