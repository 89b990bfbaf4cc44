# SPDX-License-Identifier: Apache-2.0
"""A Mininet script of one's own, with DLCP's switches: the two lines marked with + are what it takes."""

from dlcp.controller.testbed.mininet import DlcpSwitch, configure  # + comes first: it finds Mininet for any Python
from mininet.link import TCLink
from mininet.net import Mininet
from mininet.topo import LinearTopo

net = Mininet(topo=LinearTopo(k=2, n=2, bw=20), link=TCLink, switch=DlcpSwitch, controller=None)
net.start()
try:
    configure(net)  # +
    net.pingAll()
finally:
    net.stop()
