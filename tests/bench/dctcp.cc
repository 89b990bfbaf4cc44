// SPDX-License-Identifier: Apache-2.0
// DCTCP flows in ns-3, for `python -m tests.bench ns3`: hosts around a switch that marks above a number of packets.
//
// Standard input has a line for each flow: begin in nanoseconds, source, target, bytes. Standard output has one for each:
// when its connection was open at the source, and when the target had all bytes, in nanoseconds. -1: not within the time.

#include <cstdint>
#include <iostream>
#include <vector>

#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/traffic-control-module.h"

using namespace ns3;

struct Flow
{
    int64_t begin;
    uint32_t source, target;
    uint64_t bytes, written = 0, received = 0;
    int64_t open = -1, end = -1;
};

static std::vector<Flow> flows;

static void Write(uint32_t number, Ptr<Socket> socket, uint32_t)
{
    Flow& flow = flows[number];
    while (flow.written < flow.bytes && socket->GetTxAvailable() > 0)
    {
        uint64_t room = std::min<uint64_t>({flow.bytes - flow.written, socket->GetTxAvailable(), 1 << 16});
        int sent = socket->Send(Create<Packet>(room));
        if (sent <= 0)
            return;
        flow.written += sent;
    }
    if (flow.written == flow.bytes)
        socket->Close();
}

static void Open(uint32_t number, Ptr<Socket> socket)
{
    flows[number].open = Simulator::Now().GetNanoSeconds();
    Write(number, socket, 0);
}

static void Read(uint32_t number, Ptr<Socket> socket)
{
    Flow& flow = flows[number];
    while (Ptr<Packet> packet = socket->Recv())
    {
        if (packet->GetSize() == 0)
            break;
        flow.received += packet->GetSize();
    }
    if (flow.received == flow.bytes && flow.end < 0)
        flow.end = Simulator::Now().GetNanoSeconds();
}

static void Accept(uint32_t number, Ptr<Socket> socket, const Address&)
{
    socket->SetRecvCallback(MakeBoundCallback(&Read, number));
}

static void Begin(uint32_t number, NodeContainer hosts, Ipv4Address target)
{
    Ptr<Socket> socket = Socket::CreateSocket(hosts.Get(flows[number].source), TcpSocketFactory::GetTypeId());
    socket->SetConnectCallback(MakeBoundCallback(&Open, number), MakeNullCallback<void, Ptr<Socket>>());
    socket->SetSendCallback(MakeBoundCallback(&Write, number));
    socket->Connect(InetSocketAddress(target, 1000 + number));
}

int main(int argc, char* argv[])
{
    uint32_t hostCount = 16, threshold = 65, buffer = 1000, payload = 1440, window = 10;
    double rateGbps = 10, delayUs = 1, timeoutMs = 2, stopS = 10;
    bool delayed = false;
    CommandLine command(__FILE__);
    command.AddValue("hosts", "hosts around the switch", hostCount);
    command.AddValue("rate", "of links, Gbit/s", rateGbps);
    command.AddValue("delay", "of links, microseconds", delayUs);
    command.AddValue("threshold", "packets in a queue above which arriving ones are marked", threshold);
    command.AddValue("buffer", "packets of a queue", buffer);
    command.AddValue("payload", "bytes of a segment", payload);
    command.AddValue("window", "initial, in segments", window);
    command.AddValue("timeout", "the least, milliseconds", timeoutMs);
    command.AddValue("delayed", "delay acknowledgements", delayed);
    command.AddValue("stop", "seconds", stopS);
    command.Parse(argc, argv);

    Config::SetDefault("ns3::TcpL4Protocol::SocketType", StringValue("ns3::TcpDctcp"));
    Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(payload));
    Config::SetDefault("ns3::TcpSocket::InitialCwnd", UintegerValue(window));
    Config::SetDefault("ns3::TcpSocket::DelAckCount", UintegerValue(delayed ? 2 : 1));
    Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(1 << 24));
    Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(1 << 24));
    Config::SetDefault("ns3::TcpSocketBase::MinRto", TimeValue(MilliSeconds(timeoutMs)));
    Config::SetDefault("ns3::TcpSocketBase::ClockGranularity", TimeValue(MicroSeconds(10)));
    Config::SetDefault("ns3::TcpSocket::ConnTimeout", TimeValue(MilliSeconds(timeoutMs)));

    NodeContainer hosts, middle;
    hosts.Create(hostCount);
    middle.Create(1);
    InternetStackHelper().Install(NodeContainer(hosts, middle));
    PointToPointHelper links;
    links.SetDeviceAttribute("DataRate", DataRateValue(DataRate(uint64_t(rateGbps * 1e9))));
    links.SetDeviceAttribute("Mtu", UintegerValue(9000));
    links.SetChannelAttribute("Delay", TimeValue(NanoSeconds(int64_t(delayUs * 1000))));
    links.SetQueue("ns3::DropTailQueue", "MaxSize", StringValue("1p"));
    TrafficControlHelper marking, fair;
    marking.SetRootQueueDisc("ns3::RedQueueDisc",
                             "MinTh", DoubleValue(threshold), "MaxTh", DoubleValue(threshold + 1),
                             "MaxSize", QueueSizeValue(QueueSize(QueueSizeUnit::PACKETS, buffer)),
                             "QW", DoubleValue(1), "LInterm", DoubleValue(1), "Gentle", BooleanValue(false),
                             "UseEcn", BooleanValue(true), "UseHardDrop", BooleanValue(false),
                             "MeanPktSize", UintegerValue(payload + 60),
                             "LinkBandwidth", DataRateValue(DataRate(uint64_t(rateGbps * 1e9))),
                             "LinkDelay", TimeValue(NanoSeconds(int64_t(delayUs * 1000))));
    // Hosts serve their connections in turn, and do not mark.
    fair.SetRootQueueDisc("ns3::FqCoDelQueueDisc", "MaxSize", StringValue("1000000p"), "Flows", UintegerValue(65536),
                           "UseEcn", BooleanValue(false), "Target", StringValue("1000s"), "Interval", StringValue("1000s"),
                           "DropBatchSize", UintegerValue(1));
    Ipv4AddressHelper addresses("10.0.0.0", "255.255.255.0");
    std::vector<Ipv4Address> address;
    for (uint32_t host = 0; host < hostCount; host++)
    {
        NetDeviceContainer ends = links.Install(hosts.Get(host), middle.Get(0));
        fair.Install(ends.Get(0));
        marking.Install(ends.Get(1));
        address.push_back(addresses.Assign(ends).GetAddress(0));
        addresses.NewNetwork();
    }
    Ipv4GlobalRoutingHelper::PopulateRoutingTables();

    Flow flow;
    while (std::cin >> flow.begin >> flow.source >> flow.target >> flow.bytes)
        flows.push_back(flow);
    for (uint32_t number = 0; number < flows.size(); number++)
    {
        Ptr<Socket> listener = Socket::CreateSocket(hosts.Get(flows[number].target), TcpSocketFactory::GetTypeId());
        listener->Bind(InetSocketAddress(Ipv4Address::GetAny(), 1000 + number));
        listener->Listen();
        listener->SetAcceptCallback(MakeNullCallback<bool, Ptr<Socket>, const Address&>(),
                                    MakeBoundCallback(&Accept, number));
        Simulator::Schedule(NanoSeconds(flows[number].begin), &Begin, number, hosts, address[flows[number].target]);
    }
    Simulator::Stop(Seconds(stopS));
    Simulator::Run();
    for (const Flow& each : flows)
        std::cout << each.open << ' ' << each.end << '\n';
    Simulator::Destroy();
}
