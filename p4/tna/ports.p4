// SPDX-License-Identifier: Apache-2.0

// Tables, counters and registers use the fabric's port numbers. The driver provides that of the ingress port
// (parser.p4); this control translates that of the egress port to a device port.
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
