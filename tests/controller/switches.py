# SPDX-License-Identifier: Apache-2.0
"""Switches to be controlled: the built-in one's P4Runtime server, and real BMv2, each on a free port."""

import shutil
import socket
import subprocess
import tempfile
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dlcp.controller.fabric import FabricSwitch, Tls
from dlcp.switch.p4runtime.device import P4RuntimeDevice
from dlcp.switch.p4runtime.service import P4RuntimeServer, TlsFiles
from tests.transport.free_ports import free_port
from tests.waiting import until

START_DEADLINE_S = 20.0


class IdleLoop:
    """A packet loop without packets: calls are made at once."""

    program = None

    def call(self, function):
        future = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future

    def replace(self, program):
        self.program = program


class Builtin:
    """The P4Runtime server of a built-in switch; ``restart`` loses all it was told."""

    kind = "builtin"

    def __init__(self, tls=None):
        self._tls = tls
        self.loop = IdleLoop()
        self._server = P4RuntimeServer(P4RuntimeDevice(self.loop), ("127.0.0.1", 0), tls=tls)
        self.address = self._server.address

    def stop(self):
        self._server.close()

    def restart(self):
        host, _, port = self.address.rpartition(":")
        self.stop()
        self.loop = IdleLoop()
        self._server = P4RuntimeServer(P4RuntimeDevice(self.loop), (host, int(port)), tls=self._tls)


class Bmv2:
    """simple_switch_grpc without interfaces; ``options`` are those of its target."""

    kind = "bmv2"

    def __init__(self, tls=None, options=("--priority-queues", "8")):
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="dlcp-bmv2-")
        self.address = f"127.0.0.1:{free_port()}"
        self.thrift = f"127.0.0.1:{free_port()}"
        self._tls = tls
        self._start()

    def stop(self):
        self._process.terminate()
        self._process.wait(10)
        self._folder.cleanup()

    def restart(self):
        self._process.terminate()
        self._process.wait(10)
        self._start()

    def _start(self):
        notifications = f"ipc://{self._folder.name}/notifications.ipc"
        thrift = self.thrift.rpartition(":")[2]
        argv = ["simple_switch_grpc", "--no-p4", "--device-id", "1", "-L", "off", "--thrift-port", thrift]
        argv += ["--notifications-addr", notifications, "--", *self._options]
        argv += ["--grpc-server-addr", self.address]
        if self._tls is not None:
            argv += ["--grpc-server-ssl", "--grpc-server-with-client-auth"]
            argv += ["--grpc-server-cacert", str(self._tls.ca), "--grpc-server-cert", str(self._tls.certificate)]
            argv += ["--grpc-server-key", str(self._tls.key)]
        mortal = ["setpriv", "--pdeathsig", "KILL"]  # ends with this process, even if that is killed
        self._process = subprocess.Popen([*mortal, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for address in (self.address, self.thrift):
            await_port(address, self._process)


@contextmanager
def running(kind, tls=None, **more):
    """Start a switch of a kind, or skip the test and say why not."""
    if kind == "bmv2" and shutil.which("simple_switch_grpc") is None:
        pytest.skip("simple_switch_grpc is not on PATH; p4lang's package p4lang-bmv2 brings it")
    switch = {"builtin": Builtin, "bmv2": Bmv2}[kind](tls, **more)
    try:
        yield switch
    finally:
        switch.stop()


def described(switch, name="s1", **changes):
    """The description of a running switch."""
    control = {} if "tls" in changes else {"insecure": True}
    return FabricSwitch(name, switch.kind, grpc=switch.address, **control, **changes)


def await_port(address, process):
    host, _, port = address.rpartition(":")

    def answers():
        assert process.poll() is None, "the switch has ended"
        with suppress(OSError):
            socket.create_connection((host, int(port)), 1).close()
            return True

    until(answers, f"nobody listens at {address}", START_DEADLINE_S)


class Certificates:
    """A certificate authority and its certificates, made by openssl."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self._authority("ca")
        self._authority("other")
        self._sign("switch", "ca")
        self._sign("controller", "ca")
        self._sign("stranger", "other")

    def of_switch(self):
        return TlsFiles(self._path("switch.pem"), self._path("switch.key"), self._path("ca.pem"))

    def of_controller(self, name="controller"):
        paths = (str(self._path(part)) for part in ("ca.pem", f"{name}.pem", f"{name}.key"))
        return Tls(*paths, server_name="localhost")

    def _path(self, name):
        return self.folder / name

    def _authority(self, name):
        self._openssl("req", "-x509", *self._new_key(name), "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}")

    def _sign(self, name, authority):
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        self._openssl(
            "req", "-x509", *self._new_key(name), "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}",
            "-addext", names, "-addext", "basicConstraints=critical,CA:FALSE",
            "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
        )  # fmt: skip

    def _new_key(self, name):
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")

    def _openssl(self, *arguments):
        done = subprocess.run(["openssl", *arguments], cwd=self.folder, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
