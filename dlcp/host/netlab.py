# SPDX-License-Identifier: Apache-2.0
"""Emulated networks on one machine: hosts, switches and routers in network namespaces, joined by veth pairs.

The machine's own network is never touched: both ends of every link are in namespaces. Creating one requires root, or
root in a user namespace (:func:`become_root`).
"""

import array
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from dlcp.host.closing import Closing
from dlcp.host.ip import IPV4, IPV6, IpFamily

CONGESTION_CONTROL: Final = "cubic"
"""Congestion control of the hosts' TCP, so that results do not depend on the machine's default."""
MTU_BYTES: Final = 1500
HOST_INTERFACE: Final = "eth0"
END_DEADLINE_S: Final = 5.0
"""Time for the processes of a namespace to end after a signal."""

_T = TypeVar("_T")
_NAMED: Final = Path("/run/netns")
"""iproute2's folder of named namespaces."""
_POLL_S: Final = 0.05
_CLONE_NEWNET: Final = 0x40000000
_SIOCETHTOOL, _SIOCSIFFLAGS, _SIOCSIFADDR = 0x8946, 0x8914, 0x8916
_OFFLOADS_OFF: Final = (0x15, 0x17, 0x19, 0x1F, 0x24, 0x26, 0x2C)
"""Requests of linux/ethtool.h that turn offloads off with a value of 0: ETHTOOL_SRXCSUM, STXCSUM, SSG, STSO, SGSO,
SFLAGS (VLAN tags, LRO) and SGRO. Without checksums, the kernel turns off UDP segmentation as well."""
_RE_EXECUTED: Final = "DLCP_IN_USER_NAMESPACE"


class NamespaceError(RuntimeError):
    """A namespace or a link could not be created; the message says what was tried and what to do."""


class NetworkNamespace(ABC):
    """A network namespace, and the programs that configure it.

    Parameters
    ----------
    name
        For messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def path(self) -> str:
        """A path to the namespace, for ``ip ... netns PATH`` or ``nsenter --net=PATH``."""

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function in a thread in this namespace. Sockets that it opens stay in the namespace."""

        def enter_and_call() -> _T:
            enter(self.path)
            return function()

        return _in_thread(enter_and_call)

    def popen(self, argv: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a process in this namespace; options as for ``subprocess.Popen``."""
        return self.call(lambda: subprocess.Popen(argv, **options))

    def run(self, argv: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[Any]":
        """Run a process in this namespace and wait for it; options as for ``subprocess.run``."""
        return self.call(lambda: subprocess.run(argv, check=False, **options))

    def ip(self, *commands: str) -> None:
        """Run commands of iproute2's ``ip`` in this namespace.

        Raises
        ------
        NamespaceError
            ``ip`` refused one.
        """
        done = self.run(["ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True)
        if done.returncode:
            raise NamespaceError(f"{self.name}: ip {'; '.join(commands)}: {done.stderr.strip()}")

    def tc(self, *words: str) -> None:
        """Run one command of iproute2's ``tc`` in this namespace.

        Raises
        ------
        NamespaceError
            ``tc`` refused it.
        """
        done = self.run(["tc", *words], capture_output=True, text=True)
        if done.returncode:
            raise NamespaceError(f"{self.name}: tc {' '.join(words)}: {done.stderr.strip()}")

    def sysctl(self, name: str, value: str) -> None:
        """Set a parameter of this namespace by its path below ``/proc/sys``, such as ``net/ipv4/ip_forward``."""
        self.call(lambda: Path("/proc/sys", name).write_text(value, encoding="ascii"))

    def prepare(self, family: IpFamily = IPV4) -> None:
        """Bring the loopback interface up, with an address of one ``family`` only; turn IPv6 off if it is IPv4."""
        self.call(partial(_prepare, family))

    def turn_off_offloads(self, interface: str) -> None:
        """Turn off the offloads of an interface, which would let frames lack checksums or be merged.

        Raises
        ------
        NamespaceError
            The kernel refused.
        """
        self.call(partial(_turn_off_offloads, interface))

    def limit_rate(self, interface: str, rate_bps: int, *, burst_bytes: int, limit_bytes: int) -> None:
        """Limit an interface's output to ``rate_bps``, counted in Ethernet frames, by a token bucket (``tbf``).

        Parameters
        ----------
        burst_bytes
            Largest burst after a pause.
        limit_bytes
            Length of the queue; further packets are dropped.

        Raises
        ------
        NamespaceError
            The kernel has no token bucket filter.
        """
        bucket = ("rate", f"{rate_bps}bit", "burst", str(burst_bytes), "limit", str(limit_bytes))
        self.tc("qdisc", "replace", "dev", interface, "root", "tbf", *bucket)

    def link(
        self,
        interface: str,
        peer: "NetworkNamespace",
        peer_interface: str,
        *,
        mtu_bytes: int = MTU_BYTES,
        peer_mac: str = "",
        offloads: bool = False,
    ) -> None:
        """Create a link to an interface of another namespace, and bring this end up.

        Parameters
        ----------
        peer_mac
            Address of the other end; the kernel's choice if empty.
        offloads
            Leave the offloads of both ends on.
        """
        address = f" address {peer_mac}" if peer_mac else ""
        self.ip(
            f"link add {interface} mtu {mtu_bytes} type veth peer name {peer_interface} mtu {mtu_bytes}{address} "
            f"netns {peer.path}",
            f"link set {interface} up",
        )
        if not offloads:
            self.turn_off_offloads(interface)
            peer.turn_off_offloads(peer_interface)


class Namespace(NetworkNamespace):
    """A new anonymous namespace, with its loopback interface up and IPv6 off, or with IPv6 only.

    It lives as long as this process holds its file descriptor, or a process runs or a socket is open in it. So nothing
    is left behind, not even after a crash.
    """

    def __init__(self, name: str, family: IpFamily = IPV4) -> None:
        super().__init__(name)
        self._fd = _in_thread(_new_namespace_fd)
        try:
            self.prepare(family)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """A path to the namespace while this object lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Release the namespace."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class NamedNamespace(NetworkNamespace):
    """A namespace by its name, as ``ip netns list`` shows it.

    The name keeps the namespace alive, so that the processes in it can be found and ended, even after a crash.
    """

    @property
    def path(self) -> str:
        """The file that represents it."""
        return str(_NAMED / self.name)

    @property
    def exists(self) -> bool:
        """Whether a namespace of this name exists."""
        return Path(self.path).exists()

    def attach(self, pid: int) -> None:
        """Give this name to the namespace of a process.

        Raises
        ------
        NamespaceError
            The name is taken, or this system does not allow named namespaces.
        """
        _netns("attach", self.name, str(pid))

    def pids(self) -> list[int]:
        """Return the ids of the processes in this namespace."""
        return [int(pid) for pid in _netns("pids", self.name).split()] if self.exists else []

    def clear(self) -> int:
        """End all processes in this namespace, first with SIGTERM, then with SIGKILL; return how many there were.

        Raises
        ------
        NamespaceError
            A process does not end.
        """
        began = self.pids()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            give_up_s = time.monotonic() + END_DEADLINE_S
            while self.pids() and time.monotonic() < give_up_s:
                time.sleep(_POLL_S)
        left = self.pids()
        if left:
            raise NamespaceError(f"namespace {self.name}: processes {left} do not end: they are blocked in the kernel")
        return len(began)

    def detach(self) -> None:
        """Remove the name; the namespace lives on while a process runs in it."""
        _netns("delete", self.name)

    def remove(self) -> None:
        """End its processes, and delete it with its interfaces."""
        if self.exists:
            self.clear()
            self.detach()


@dataclass(frozen=True)
class NetworkHost:
    """A host of a :class:`StarNetwork`: its addresses, its namespace, and the name of the switch's end of its link."""

    index: int
    port: int
    address: str
    mac: str
    namespace: Namespace
    switch_interface: str


class StarNetwork(Closing):
    """Hosts around one switch, each with a link of its own; a context manager.

    Host k has 10.0.0.(k+1)/24 and 02:00:00:00:00:(k+1) on ``eth0`` and static neighbour entries, so no ARP crosses the
    switch. The other end of its link is ``port<k+1>`` in ``network.switch``.

    Parameters
    ----------
    hosts
        Number of hosts, 1..250.
    mtu_bytes
        MTU of both ends of each link.
    congestion_control
        Congestion control of the hosts' TCP; the kernel must support it.

    Raises
    ------
    NamespaceError
        Something could not be set up; nothing is left behind.
    """

    def __init__(self, hosts: int, *, mtu_bytes: int = MTU_BYTES, congestion_control: str = CONGESTION_CONTROL) -> None:
        if not 1 <= hosts <= 250:
            raise NamespaceError(f"{hosts} hosts; a star network must have 1 to 250")
        check_congestion_control(congestion_control)
        self._made: list[Namespace] = []
        self.hosts: list[NetworkHost] = []
        """The hosts, number 0 first."""
        try:
            self.switch = self._namespace("switch")
            for index in range(hosts):
                self.hosts.append(self._host(index, mtu_bytes, congestion_control))
            for host in self.hosts:
                self._introduce(host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release all namespaces; each is deleted with the last process in it."""
        while self._made:
            self._made.pop().close()

    def _namespace(self, name: str) -> Namespace:
        namespace = Namespace(name)
        self._made.append(namespace)
        return namespace

    def _host(self, index: int, mtu_bytes: int, congestion_control: str) -> NetworkHost:
        number = index + 1
        address, mac, interface = f"10.0.0.{number}", f"02:00:00:00:00:{number:02x}", f"port{number}"
        namespace = self._namespace(f"host {index}")
        self.switch.link(interface, namespace, HOST_INTERFACE, mtu_bytes=mtu_bytes, peer_mac=mac)
        # The route sets the congestion control: a namespace's sysctl accepts only the algorithms that the machine's
        # administrator allows to all users (tcp_allowed_congestion_control), which may exclude cubic.
        namespace.ip(
            f"addr add {address}/24 dev {HOST_INTERFACE} noprefixroute",
            f"link set {HOST_INTERFACE} up",
            f"route add 10.0.0.0/24 dev {HOST_INTERFACE} src {address} congctl {congestion_control}",
        )
        return NetworkHost(index, number, address, mac, namespace, interface)

    def _introduce(self, host: NetworkHost) -> None:
        others = [other for other in self.hosts if other is not host]
        host.namespace.ip(
            *(f"neigh add {other.address} lladdr {other.mac} dev {HOST_INTERFACE} nud permanent" for other in others),
        )


def enter(path: str) -> None:
    """Move the calling thread into the namespace at ``path`` (:attr:`Namespace.path`)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(fd)
    finally:
        os.close(fd)


def available() -> tuple[bool, str]:
    """Return whether this process can create namespaces and links, and the reason if not."""
    if sys.platform != "linux":
        return False, f"network namespaces require Linux, not {sys.platform}"
    if shutil.which("ip") is None:
        return False, "the command `ip` is missing; install iproute2"
    try:
        first, second = Namespace("trial 1"), Namespace("trial 2")
    except (NamespaceError, OSError) as error:
        return False, str(error)
    try:
        first.ip(f"link add trial type veth peer name trial netns {second.path}")
        first.call(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close())
    except (NamespaceError, OSError) as error:
        return False, str(error)
    finally:
        first.close()
        second.close()
    return True, "network namespaces, veth links and packet sockets work"


def become_root() -> None:
    """Re-execute this program as root of its own user namespace, unless it can already create namespaces.

    Does not return if the program is re-executed. Call it first, before starting threads or opening files.

    Raises
    ------
    NamespaceError
        This process is not root, and user namespaces are not allowed.
    """
    works, reason = available()
    if works:
        return
    unshare = shutil.which("unshare")
    if os.environ.get(_RE_EXECUTED) or unshare is None:
        raise NamespaceError(f"{reason}; run as root, or install util-linux and allow user namespaces")
    isolate = [unshare, "--user", "--map-root-user", "--net", "--mount"]
    trial = subprocess.run([*isolate, "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        raise NamespaceError(f"{reason}; user namespaces are not allowed here: {trial.stderr.strip()}; run as root")
    os.execve(unshare, [*isolate, sys.executable, *sys.orig_argv[1:]], {**os.environ, _RE_EXECUTED: "1"})


def check_congestion_control(name: str) -> None:
    """Refuse a TCP congestion control that this kernel lacks.

    Raises
    ------
    NamespaceError
        The kernel lacks it; the message lists the available ones.
    """
    known = congestion_controls()
    if name not in known:
        raise NamespaceError(f"this kernel has no TCP congestion control {name!r}; it has {', '.join(known)}")


def congestion_controls() -> list[str]:
    """Return the TCP congestion controls of this kernel."""
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").split()


def _turn_off_offloads(interface: str) -> None:
    """Turn off the offloads of an interface of the caller's namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request in _OFFLOADS_OFF:
            value = array.array("I", [request, 0])
            address, _ = value.buffer_info()
            try:
                fcntl.ioctl(sock.fileno(), _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), address))
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:  # without it, the device has no such offload
                    raise NamespaceError(f"cannot turn off the offloads of {interface}: {error.strerror}") from error


def _netns(*words: str) -> str:
    """Run ``ip netns`` and return its output."""
    done = subprocess.run(["ip", "netns", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NamespaceError(f"ip netns {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _prepare(family: IpFamily) -> None:
    # Before any interface comes up, so that IPv6 never announces an address, or uses each without checking for others.
    setting, value = ("disable_ipv6", "1") if family is IPV4 else ("accept_dad", "0")
    for path in Path("/proc/sys/net/ipv6/conf").glob(f"*/{setting}"):
        path.write_text(value, encoding="ascii")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        up = struct.pack("16sH22x", b"lo", 1)  # IFF_UP
        fcntl.ioctl(sock.fileno(), _SIOCSIFFLAGS, up)
        if family is IPV6:  # remove 127.0.0.1, which the kernel has added
            fcntl.ioctl(sock.fileno(), _SIOCSIFADDR, struct.pack("16sH22x", b"lo", socket.AF_INET))


def _new_namespace_fd() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise NamespaceError(f"cannot create a network namespace: {os.strerror(number)}; this needs root")
    return os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise NamespaceError(f"cannot enter a network namespace: {os.strerror(number)}")


def _in_thread(function: Callable[[], _T]) -> _T:
    """Call a function in a new thread: a thread's namespace ends with the thread."""
    with ThreadPoolExecutor(1, "dlcp-namespace") as thread:
        return thread.submit(function).result()
