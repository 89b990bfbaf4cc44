-- SPDX-License-Identifier: Apache-2.0
-- Wireshark dissector of the DLCP header. Written by `python -m dlcp.wire.dissector`: change that, not this.

local dlcp = Proto("dlcp", "Deep-Learning Communication Packet")

local VERSION = @VERSION@
local HEADER_BYTES = @HEADER_BYTES@
local TYPES = {
@TYPES@
}

local f = {
@FIELDS@
    ack_path = ProtoField.uint32("dlcp.ack_path", "Path", base.DEC),
    ack_marked = ProtoField.uint64("dlcp.ack_marked", "Packets that arrived marked on it", base.DEC),
    packet_bytes = ProtoField.uint32("dlcp.packet_bytes", "Message bytes per packet", base.DEC),
    room = ProtoField.uint32("dlcp.room", "Room for packets in flight", base.DEC),
    path_port = ProtoField.uint16("dlcp.path_port", "UDP port of another path", base.DEC),
}
dlcp.fields = {
    @FIELD_LIST@,
    f.ack_path,
    f.ack_marked,
    f.packet_bytes,
    f.room,
    f.path_port,
}

local too_short = ProtoExpert.new(
    "dlcp.too_short", "Too short for a DLCP header", expert.group.MALFORMED, expert.severity.ERROR)
local other_version = ProtoExpert.new(
    "dlcp.other_version", "Not a DLCP version that this dissector knows", expert.group.PROTOCOL, expert.severity.WARN)
local unknown_type = ProtoExpert.new(
    "dlcp.unknown_type", "Unknown DLCP packet type", expert.group.PROTOCOL, expert.severity.WARN)
local truncated = ProtoExpert.new(
    "dlcp.truncated", "[truncated] The capture has only the first bytes of this packet",
    expert.group.UNDECODED, expert.severity.NOTE)
dlcp.experts = { too_short, other_version, unknown_type, truncated }

-- Each header field's first byte and number of bytes.
local PLACES = {
@PLACES@
}

local ACK, PROBE, STOP, HELLO, HELLO_ACK = @ACK@, @PROBE@, @STOP@, @HELLO@, @HELLO_ACK@
local ENTRY_BYTES, ACK_PATH = @ENTRY_BYTES@, @ACK_PATH@
local PIECE = @PIECE@
local GREETING_BYTES, PORT_BYTES = @GREETING_BYTES@, @PORT_BYTES@

local function describe_ack(buffer)
    return string.format(
        "ACK job %u sender %u received at %u us marked %u after %u us",
        @job_value@,
        @sender_value@,
        @index_value@,
        @count_value@,
        @step_value@)
end

local function describe_any(buffer)
    return string.format(
        "%s job %u step %u message %u sender %u packet %u/%u layer %u queue %u class %u",
        TYPES[@type_value@] or "type " .. @type_value@,
        @job_value@,
        @step_value@,
        @message_value@,
        @sender_value@,
        @index_value@,
        @count_value@,
        @layer_value@,
        @queue_value@,
        @drop_class_value@)
end

local function describe_question(buffer, left)
    local text = describe_any(buffer)
    local captured = buffer:len() - HEADER_BYTES
    if captured > 0 and buffer(HEADER_BYTES, 1):uint() == 1 then
        text = text .. ", more to come"
    end
    return text
end

-- Payloads are described in the packets that have them whole.
local function is_piece(buffer)
    return @flags_spare_value@ >= PIECE
end

local function describe(buffer)
    local kind, left = @type_value@, buffer:reported_len() - HEADER_BYTES
    if is_piece(buffer) then
        return "Piece of " .. describe_any(buffer)
    elseif kind == ACK then
        return describe_ack(buffer)
    elseif kind == PROBE then
        return describe_question(buffer, left)
    elseif kind == STOP and left == 0 then
        return describe_any(buffer) .. ", all arrived"
    end
    return describe_any(buffer)
end

local function add_entries(buffer, tree)
    for at = HEADER_BYTES, buffer:len() - ENTRY_BYTES, ENTRY_BYTES do
        if buffer(at + 6, 4):uint() == ACK_PATH then
            local entry = tree:add(dlcp, buffer(at, ENTRY_BYTES), "Marked")
            entry:add(f.ack_path, buffer(at, 4))
            entry:add(f.ack_marked, buffer(at + 10, 8))
        else
            local entry = tree:add(dlcp, buffer(at, ENTRY_BYTES), "Acknowledged")
@ENTRY_ADDS@
        end
    end
end

local function add_greeting(buffer, tree)
    local greeting = tree:add(dlcp, buffer(HEADER_BYTES), "Greeting")
    local function add(field, at, bytes)
        if at + bytes <= buffer:len() then
            greeting:add(field, buffer(at, bytes))
        end
    end
    add(f.packet_bytes, HEADER_BYTES, 4)
    add(f.room, HEADER_BYTES + 4, 4)
    for at = HEADER_BYTES + GREETING_BYTES, buffer:len() - PORT_BYTES, PORT_BYTES do
        add(f.path_port, at, PORT_BYTES)
    end
end

-- A capture may hold fewer bytes than arrived (snaplen): what a packet is depends on its length on the wire,
-- reported_len(), and what can be read on the captured one, len().
function dlcp.dissector(buffer, packet, tree)
    packet.cols.protocol = "DLCP"
    local captured, is_cut = buffer:len(), buffer:len() < buffer:reported_len()
    local branch = captured > 0 and tree:add(dlcp, buffer(0, math.min(captured, HEADER_BYTES))) or tree:add(dlcp)
    if is_cut then
        branch:add_proto_expert_info(truncated)
    end
    if buffer:reported_len() < HEADER_BYTES then
        branch:add_proto_expert_info(too_short)
        return captured
    end
    if captured > 0 and @version_value@ ~= VERSION then
        branch:add(f.version, @version_range@)
        branch:add_proto_expert_info(other_version)
        return captured
    end
    for _, place in ipairs(PLACES) do
        if place[2] + place[3] <= captured then
            branch:add(place[1], buffer(place[2], place[3]))
        end
    end
    if captured < HEADER_BYTES then
        packet.cols.info = "[truncated]"
        return captured
    end
    if not TYPES[@type_value@] then
        branch:add_proto_expert_info(unknown_type)
    end
    packet.cols.info = describe(buffer) .. (is_cut and " [truncated]" or "")
    local left = buffer:reported_len() - HEADER_BYTES
    if captured == HEADER_BYTES then
        return captured
    elseif is_piece(buffer) then
        Dissector.get("data"):call(buffer(HEADER_BYTES):tvb(), packet, tree)
    elseif @type_value@ == ACK and left % ENTRY_BYTES == 0 then
        add_entries(buffer, tree)
    elseif (@type_value@ == HELLO or @type_value@ == HELLO_ACK) and @index_value@ == 0 and left >= GREETING_BYTES then
        add_greeting(buffer, tree)
    else
        Dissector.get("data"):call(buffer(HEADER_BYTES):tvb(), packet, tree)
    end
    return captured
end

local ports = DissectorTable.get("udp.port")
for port = @FIRST_PORT@, @LAST_PORT@ do
    ports:add(port, dlcp)
end
