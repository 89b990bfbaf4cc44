// SPDX-License-Identifier: Apache-2.0

// Only egress knows the depth of a queue, and only ingress can keep packets out of it. So egress sends a report to
// ingress whenever the depth has changed by more than REPORT_STEP_CELLS.
control DepthReport(
    inout egress_metadata_t meta, in bridge_t bridge, inout egress_intrinsic_metadata_for_deparser_t to_deparser) {
    Register<int<32>, depth_index_t>(DEPTH_REGISTER_SIZE) reported_depth;

    RegisterAction<int<32>, depth_index_t, bit<1>>(reported_depth) has_moved = {
        void apply(inout int<32> reported_cells, out bit<1> moved) {
            moved = 0;
            if (reported_cells - (int<32>)meta.depth_cells > REPORT_STEP_CELLS ||
                (int<32>)meta.depth_cells - reported_cells > REPORT_STEP_CELLS) {
                reported_cells = (int<32>)meta.depth_cells;
                moved = 1;
            }
        }
    };

    apply {
        depth_index_t queue = bridge.port ++ bridge.queue;
        if (has_moved.execute(queue) == 1) {
            meta.report_queue = (bit<16>)queue;
            to_deparser.mirror_type = REPORT_MIRROR;
            meta.report_session = REPORT_SESSION;
            meta.report_kind = KIND_REPORT;
        }
    }
}
