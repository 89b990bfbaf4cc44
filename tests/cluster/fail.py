# SPDX-License-Identifier: Apache-2.0
"""Runs a training script one rank of which fails: ``python -m tests.cluster.fail HOW RANK STEP FOLDER script.py ...``.

In backward of the given step (of this start, from 0), when some of its gradients have gone out, the rank is killed, is
stopped, or sleeps: HOW is ``kill``, ``stop`` or ``sleep``. It happens once: then FOLDER holds a file ``failed`` with
the inodes of the ranks' sockets. A rank that is killed leaves a ghost: a process that keeps sending what the network
may still deliver of this start. When the rank starts again, it writes which of the sockets are still there into
``left-over``.
"""

import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

from torch import nn
from torch.nn.modules.module import register_module_full_backward_pre_hook

from dlcp.transport import Endpoint
from dlcp.wire import UDP_PORT_BASE, UDP_PORT_COUNT, Header, PacketType, Queue

HOST = "127.0.0.77"
"""The ranks' sockets have an address that no other test's have."""
GHOST = f"""
import os, socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
while os.path.exists(sys.argv[1]):
    for packet in sys.argv[2:]:
        for port in range({UDP_PORT_BASE}, {UDP_PORT_BASE + UDP_PORT_COUNT}):
            sock.sendto(bytes.fromhex(packet), ("{HOST}", port))
    time.sleep(0.05)  # a pace
"""


def haunt(folder, rank):
    """Leave a process that sends, as long as the folder is there, what this start may have on its way."""
    token = next(found.connection.membership.token for found in gc.get_objects() if isinstance(found, Endpoint))
    packets = [
        Header(kind, 0, Queue.CONTROL, 0, 0, 0, 0, 0, 0, rank, 0, 1, token).encode() + b"the end of all ranks"
        for kind in (PacketType.DATA, PacketType.ABORT)
    ]
    nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", GHOST, str(folder), *(packet.hex() for packet in packets)]
    subprocess.Popen(command, start_new_session=True, **nowhere)


def open_here():
    """Return the UDP sockets at the ranks' address, and those by which ranks find each other's memory, by inode."""
    hexadecimal = "".join(f"{int(part):02X}" for part in reversed(HOST.split(".")))
    udp = [line.split() for line in Path("/proc/net/udp").read_text().splitlines()]
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    found = {words[9]: words[1] for words in udp if words[1].startswith(hexadecimal)}
    return found | {words[6]: words[-1] for words in unix if words[-1].startswith("@dlcp-")}


def held_by_ranks():
    """Return the inodes of the sockets that this job's ranks on this node hold: torchrun's other children, and we."""
    links = []
    for children in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        for process in children.read_text().split():
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    links.append(os.readlink(descriptor))
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def hang_here():
    time.sleep(600)  # until torchrun kills it


def main(how, rank, step, folder, script, *arguments):
    folder, seen = Path(folder), 0
    failed, fails = folder / "failed", os.environ["RANK"] == rank
    if failed.exists() and fails:
        found = open_here()
        left = [found[inode] for inode in failed.read_text().split() if inode in found]
        (folder / "left-over").write_text("\n".join(left))

    def fail(module, gradient):
        nonlocal seen
        # The last layer that backward comes to.
        seen += isinstance(module, nn.Linear) and module.in_features == 64
        if seen != int(step) + 1 or failed.exists() or not fails:
            return
        # Not those of another job, which may run on this machine and go on.
        failed.write_text("\n".join(held_by_ranks() & open_here().keys()))
        if how == "kill":
            haunt(folder, int(rank))
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            hang_here()

    register_module_full_backward_pre_hook(fail)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
