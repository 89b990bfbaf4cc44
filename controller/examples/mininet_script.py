# SPDX-License-Identifier: Apache-2.0
"""Your own Mininet script with DLCP's switches: it needs the three lines marked with +."""

from dlcp.controller.testbed.mininet import DlcpSwitch, configure  # + comes first: it finds Mininet for any Python
from mininet.link import TCLink
from mininet.net import Mininet
from mininet.topo import LinearTopo

net = Mininet(topo=LinearTopo(k=2, n=2, bw=20), link=TCLink, switch=DlcpSwitch, controller=None)  # +
net.start()
try:
    configure(net)  # +
    net.pingAll()
finally:
    net.stop()
