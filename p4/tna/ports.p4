// SPDX-License-Identifier: Apache-2.0

// The tables speak of ports by the fabric's numbers, which index counters and registers too. A packet gets the number
// of its ingress port from the driver (parser.p4); here the number of its egress port becomes a device port.
control Ports(in metadata_t meta, inout ingress_intrinsic_metadata_for_tm_t tm) {
    action to_device_port(PortId_t device_port) {
        tm.ucast_egress_port = device_port;
    }

    table device_port {
        key = { meta.eg_port: exact @name("eg_port"); }
        actions = { to_device_port; @defaultonly NoAction; }
        const default_action = NoAction();
        size = PORT_TABLE_SIZE;
    }

    apply {
        device_port.apply();
    }
}
