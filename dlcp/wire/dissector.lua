-- SPDX-License-Identifier: Apache-2.0
-- Wireshark dissector of the DLCP header. Written by `python -m dlcp.wire.dissector`: change that, not this.

local dlcp = Proto("dlcp", "Deep-Learning Communication Packet")

local VERSION = 1
local HEADER_BYTES = 32
local TYPES = {
    [1] = "DATA",
    [2] = "ACK",
    [3] = "PROBE",
    [4] = "BITMAP",
    [5] = "STOP",
    [6] = "STOP_ACK",
    [7] = "HELLO",
    [8] = "HELLO_ACK",
    [9] = "ABORT",
}

local f = {
    version = ProtoField.uint8("dlcp.version", "Version", base.DEC, nil, 0xf0),
    type = ProtoField.uint8("dlcp.type", "Type", base.DEC, TYPES, 0x0f),
    protected = ProtoField.bool("dlcp.protected", "Protected", 8, nil, 0x80),
    retransmission = ProtoField.bool("dlcp.retransmission", "Retransmission", 8, nil, 0x40),
    trimmed = ProtoField.bool("dlcp.trimmed", "Trimmed", 8, nil, 0x20),
    congestion = ProtoField.bool("dlcp.congestion", "Congestion echo", 8, nil, 0x10),
    flags_spare = ProtoField.uint8("dlcp.flags_spare", "Coding (0 = none, 1 to 3 = 4, 8, 16 bits a value, +4 = lower digits, +8 = a piece of a packet)", base.DEC, nil, 0x0f),
    queue = ProtoField.uint8("dlcp.queue", "Queue (7 = the most urgent)", base.DEC, nil, 0xe0),
    drop_class = ProtoField.uint8("dlcp.drop_class", "Drop class (0 = never, 7 = the least valuable)", base.DEC, nil, 0x1c),
    spare = ProtoField.uint8("dlcp.spare", "Spare", base.DEC, nil, 0x03),
    layer = ProtoField.uint8("dlcp.layer", "Layer (0 = nearest the input)", base.DEC, nil),
    job = ProtoField.uint16("dlcp.job", "Job", base.DEC, nil),
    budget = ProtoField.uint16("dlcp.budget", "Drop budget at this switch [packets]", base.DEC, nil),
    step = ProtoField.uint32("dlcp.step", "Step", base.DEC, nil),
    message = ProtoField.uint16("dlcp.message", "Message", base.DEC, nil),
    sender = ProtoField.uint16("dlcp.sender", "Sender rank", base.DEC, nil),
    index = ProtoField.uint32("dlcp.index", "Packet index", base.DEC, nil),
    count = ProtoField.uint32("dlcp.count", "Packets in the message", base.DEC, nil),
    token = ProtoField.uint64("dlcp.token", "Session token", base.HEX, nil),
    ack_step = ProtoField.uint32("dlcp.ack_step", "Step", base.DEC),
    ack_message = ProtoField.uint16("dlcp.ack_message", "Message", base.DEC),
    ack_whole = ProtoField.bool("dlcp.ack_whole", "The message is complete, every packet has arrived", 32, nil, 0x80000000),
    ack_trimmed = ProtoField.bool("dlcp.ack_trimmed", "The packets below were trimmed", 32, nil, 0x40000000),
    ack_block = ProtoField.uint32("dlcp.ack_block", "Block of 64 packets", base.DEC, nil, 0x3fffffff),
    ack_arrived = ProtoField.uint64("dlcp.ack_arrived", "Arrived (bit k = packet 64 block + k)", base.HEX),
    ack_path = ProtoField.uint32("dlcp.ack_path", "Path", base.DEC),
    ack_marked = ProtoField.uint64("dlcp.ack_marked", "Packets that arrived marked on it", base.DEC),
    packet_bytes = ProtoField.uint32("dlcp.packet_bytes", "Message bytes per packet", base.DEC),
    room = ProtoField.uint32("dlcp.room", "Room for packets in flight", base.DEC),
    path_port = ProtoField.uint16("dlcp.path_port", "UDP port of another path", base.DEC),
}
dlcp.fields = {
    f.version,
    f.type,
    f.protected,
    f.retransmission,
    f.trimmed,
    f.congestion,
    f.flags_spare,
    f.queue,
    f.drop_class,
    f.spare,
    f.layer,
    f.job,
    f.budget,
    f.step,
    f.message,
    f.sender,
    f.index,
    f.count,
    f.token,
    f.ack_step,
    f.ack_message,
    f.ack_whole,
    f.ack_trimmed,
    f.ack_block,
    f.ack_arrived,
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
    { f.version, 0, 1 },
    { f.type, 0, 1 },
    { f.protected, 1, 1 },
    { f.retransmission, 1, 1 },
    { f.trimmed, 1, 1 },
    { f.congestion, 1, 1 },
    { f.flags_spare, 1, 1 },
    { f.queue, 2, 1 },
    { f.drop_class, 2, 1 },
    { f.spare, 2, 1 },
    { f.layer, 3, 1 },
    { f.job, 4, 2 },
    { f.budget, 6, 2 },
    { f.step, 8, 4 },
    { f.message, 12, 2 },
    { f.sender, 14, 2 },
    { f.index, 16, 4 },
    { f.count, 20, 4 },
    { f.token, 24, 8 },
}

local ACK, PROBE, STOP, HELLO, HELLO_ACK = 2, 3, 5, 7, 8
local ENTRY_BYTES, ACK_PATH = 18, 2147483647
local PIECE = 8
local GREETING_BYTES, PORT_BYTES = 8, 2

local function describe_ack(buffer)
    return string.format(
        "ACK job %u sender %u received at %u us marked %u after %u us",
        buffer(4, 2):uint(),
        buffer(14, 2):uint(),
        buffer(16, 4):uint(),
        buffer(20, 4):uint(),
        buffer(8, 4):uint())
end

local function describe_any(buffer)
    return string.format(
        "%s job %u step %u message %u sender %u packet %u/%u layer %u queue %u class %u",
        TYPES[buffer(0, 1):bitfield(4, 4)] or "type " .. buffer(0, 1):bitfield(4, 4),
        buffer(4, 2):uint(),
        buffer(8, 4):uint(),
        buffer(12, 2):uint(),
        buffer(14, 2):uint(),
        buffer(16, 4):uint(),
        buffer(20, 4):uint(),
        buffer(3, 1):uint(),
        buffer(2, 1):bitfield(0, 3),
        buffer(2, 1):bitfield(3, 3))
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
    return buffer(1, 1):bitfield(4, 4) >= PIECE
end

local function describe(buffer)
    local kind, left = buffer(0, 1):bitfield(4, 4), buffer:reported_len() - HEADER_BYTES
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
            entry:add(f.ack_step, buffer(at + 0, 4))
            entry:add(f.ack_message, buffer(at + 4, 2))
            entry:add(f.ack_whole, buffer(at + 6, 4))
            entry:add(f.ack_trimmed, buffer(at + 6, 4))
            entry:add(f.ack_block, buffer(at + 6, 4))
            entry:add(f.ack_arrived, buffer(at + 10, 8))
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
    if captured > 0 and buffer(0, 1):bitfield(0, 4) ~= VERSION then
        branch:add(f.version, buffer(0, 1))
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
    if not TYPES[buffer(0, 1):bitfield(4, 4)] then
        branch:add_proto_expert_info(unknown_type)
    end
    packet.cols.info = describe(buffer) .. (is_cut and " [truncated]" or "")
    local left = buffer:reported_len() - HEADER_BYTES
    if captured == HEADER_BYTES then
        return captured
    elseif is_piece(buffer) then
        Dissector.get("data"):call(buffer(HEADER_BYTES):tvb(), packet, tree)
    elseif buffer(0, 1):bitfield(4, 4) == ACK and left % ENTRY_BYTES == 0 then
        add_entries(buffer, tree)
    elseif (buffer(0, 1):bitfield(4, 4) == HELLO or buffer(0, 1):bitfield(4, 4) == HELLO_ACK) and buffer(16, 4):uint() == 0 and left >= GREETING_BYTES then
        add_greeting(buffer, tree)
    else
        Dissector.get("data"):call(buffer(HEADER_BYTES):tvb(), packet, tree)
    end
    return captured
end

local ports = DissectorTable.get("udp.port")
for port = 53696, 53703 do
    ports:add(port, dlcp)
end
