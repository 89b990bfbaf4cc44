# SPDX-License-Identifier: Apache-2.0
"""What stands in for ``python`` in a shell; :mod:`tests.train.preloaded` says how. It imports little, to begin soon."""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(sys.argv[1])
    asked = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()])
    socket.send_fds(server, [asked.encode()], [0, 1, 2])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: server.send(str(number).encode()))
    status = int(server.recv(1 << 10) or 1)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
