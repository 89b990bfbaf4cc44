// SPDX-License-Identifier: Apache-2.0

// Cuts a packet to its headers, so that its receiver learns at once what the switch has given up. Later switches treat
// what is left as a control packet. The IP and UDP checksums are computed when the packet is put together again.
control Trim(inout headers_t hdr) {
    apply {
        bit<32> frame_bytes = TRIMMED_FRAME_BYTES;
        hdr.dlcp.trimmed = 1;
        hdr.dlcp.queue = QUEUE_CONTROL;
        hdr.udp.length_ = DLCP_UDP_LENGTH_MIN;
        if (hdr.ipv4.isValid()) {
            hdr.ipv4.dscp = TRIMMED_DSCP;
            hdr.ipv4.total_len = TRIMMED_IPV4_LENGTH;
        } else {
            hdr.ipv6.dscp = TRIMMED_DSCP;
            hdr.ipv6.payload_len = DLCP_UDP_LENGTH_MIN;
            frame_bytes = frame_bytes + TRIMMED_MORE_BYTES_IPV6;
        }
        if (hdr.vlan.isValid()) {
            frame_bytes = frame_bytes + TRIMMED_MORE_BYTES_VLAN;
        }
        truncate(frame_bytes);
    }
}
