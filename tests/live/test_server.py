# SPDX-License-Identifier: Apache-2.0
"""The live page's server: its answers, to whom, and that a client that hangs or fails delays no other."""

import http.client
import json
import re
import socket
import threading
import time
import urllib.request
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client", reason="the live page takes the packages of the extra live")

from dlcp.cli import main
from dlcp.live import http_server as module
from dlcp.live.http_server import AddressError, LiveServer, parse_listen
from tests.families import needs_ipv6
from tests.live.snapshots import snapshot, write
from tests.waiting import until


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_S", 0.01)


@pytest.fixture
def server(tmp_path):
    write(tmp_path, snapshot(0), snapshot(1))
    with LiveServer([tmp_path], "0") as found:
        until(lambda: found.snapshots)
        yield found


def ask(server, path, method="GET", **headers):
    """Return status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def say(server, text):
    """Return everything that is answered to raw bytes."""
    with socket.create_connection(server.server_address[:2], timeout=60) as client:
        client.sendall(text)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def events(server):
    """Yield the states that a page is sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    connection.close()


def test_the_page_needs_nothing_but_itself_and_allows_nothing_else(server):
    status, headers, body = ask(server, "/")
    page = body.decode()
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "{{" not in page
    assert "{%" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}, "the name of a format"
    assert re.findall(r"""(?:src|href)=["']?([^"'> ]+)""", page) == ["state", "metrics"]
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    (nonce,) = re.findall(r'<script nonce="([^"]+)">', page)
    assert f"script-src 'nonce-{nonce}'" in policy
    assert "innerHTML" not in page, "what ranks say enters as text"


def test_the_state_is_json_and_follows_the_ranks(server, tmp_path):
    status, headers, body = ask(server, "/state?whatever")
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "application/json", "no-store")
    (session,) = json.loads(body)["sessions"]
    assert [member["step"] for member in session["members"]] == [10, 10]
    write(tmp_path, snapshot(1, steps=11))
    until(lambda: json.loads(ask(server, "/state")[2])["sessions"][0]["members"][1]["step"] == 11)


def test_pages_are_told_of_changes_and_of_the_end(tmp_path):
    with ExitStack() as stack:
        server = stack.enter_context(LiveServer([tmp_path], "127.0.0.1:0"))
        stack.callback(server.training_is_over)
        told = events(server)
        assert next(told)["sessions"] == []
        write(tmp_path, snapshot(0))
        while not (state := next(told))["sessions"]:
            pass
        assert not state["over"]
        write(tmp_path, snapshot(0, steps=99))
        threading.Thread(target=stack.close).start()
        *_, last = told
    assert last["over"], "the last word"
    assert last["sessions"][0]["members"][0]["step"] == 99, "what ranks wrote just before"


def test_a_server_that_stops_does_not_say_that_training_is_over(tmp_path):
    write(tmp_path, snapshot(0))
    with ExitStack() as stack:
        server = stack.enter_context(LiveServer([tmp_path], "0"))
        told = events(server)
        next(told)
        threading.Thread(target=stack.close).start()
        assert not any(state["over"] for state in told)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /nowhere HTTP/1.0", b"404"),
        (b"GET /../../etc/passwd HTTP/1.0", b"404"),
        (b"GET //state HTTP/1.0", b"200"),
        (b"POST /state HTTP/1.0", b"501"),
        (b"DELETE / HTTP/1.0", b"501"),
        (b"GET / HTTP/9.9", b"505"),
        (b"nonsense", b"400"),
        (b"\x00\xff\xfe", b"400"),
        (b"GET /" + 70_000 * b"x" + b" HTTP/1.0", b"414"),
        (b"GET / HTTP/1.0\r\n" + b"\r\n".join(b"a%d: b" % i for i in range(200)), b"431"),
    ],
)
def test_bad_requests_are_told_so_and_harm_nothing(server, request_line, status):
    answer = say(server, request_line + b"\r\nHost: localhost\r\n\r\n")
    assert status in answer
    assert b"Traceback" not in answer
    assert ask(server, "/state")[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9464", "[::1]", "[::1]:80"])
def test_it_is_asked_for_by_a_name_of_this_machine(server, host):
    assert ask(server, "/state", Host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:9464", ""])
def test_a_page_from_elsewhere_that_calls_this_machine_its_own_gets_nothing(server, host):
    status, _, body = ask(server, "/state", Host=host)
    assert status == 403
    assert b"sessions" not in body


def test_clients_that_say_nothing_hold_nobody_up(server, tmp_path):
    with ExitStack() as stack:
        for _ in range(module.CLIENTS_MAX // 2):
            stack.enter_context(socket.create_connection(server.server_address[:2]))
        assert ask(server, "/state")[0] == 200
        write(tmp_path, snapshot(0, steps=20))
        until(lambda: 20 in {each["step"] for each in server.snapshots})


def test_more_clients_than_it_serves_are_hung_up_on_until_others_leave(server):
    with ExitStack() as stack:
        for _ in range(module.CLIENTS_MAX):
            stack.enter_context(socket.create_connection(server.server_address[:2]))
        until(lambda: say_or_nothing(server) == b"")
    until(lambda: b"200 OK" in say_or_nothing(server))


def say_or_nothing(server):
    try:
        return say(server, b"GET /state HTTP/1.0\r\nHost: localhost\r\n\r\n")
    except OSError:
        return b""


def test_a_client_that_reads_nothing_is_hung_up_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module._Handler, "timeout", 0.2)
    write(tmp_path, snapshot(0, layers=[[position, ["x" * 2000], 1, 0, 0] for position in range(256)]))
    with LiveServer([tmp_path], "0") as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.server_address[:2])
        client.sendall(b"GET /events HTTP/1.0\r\nHost: localhost\r\n\r\n")
        until(lambda: server._followers == 1)
        until(lambda: server._followers == 0)


def test_the_end_does_not_wait_for_a_client_that_hangs(tmp_path):
    write(tmp_path, snapshot(0, layers=[[position, ["x" * 2000], 1, 0, 0] for position in range(256)]))
    with socket.socket() as client:
        with LiveServer([tmp_path], "0") as server:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(server.server_address[:2])
            client.sendall(b"GET /events HTTP/1.0\r\nHost: localhost\r\n\r\n")
            until(lambda: server._followers == 1)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < module.CLIENT_S, "it has a second; that of a busy machine is longer"


def test_a_state_that_cannot_be_made_is_logged_and_the_next_one_comes(server, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(server._training, "refresh", lambda: 1 / 0)
        until(lambda: "the live page could not be updated" in caplog.text)
    write(tmp_path, snapshot(0, steps=20))
    until(lambda: 20 in {each["step"] for each in server.snapshots})


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("9464", "127.0.0.1", 9464),
        ("0", "127.0.0.1", 0),
        (":80", "127.0.0.1", 80),
        ("0.0.0.0:9464", "0.0.0.0", 9464),
        ("node17:9464", "node17", 9464),
        ("[::1]:9464", "::1", 9464),
    ],
)
def test_addresses(text, host, port):
    assert parse_listen(text) == (host, port)


@pytest.mark.parametrize("text", ["", "port", "70000", "-1", "1.5", "host:", "host:http", "::1:9464", "²"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(AddressError, match=r"takes PORT or HOST:PORT: expected host:port, got "):
        parse_listen(text)


@needs_ipv6
def test_it_listens_at_addresses_of_ipv6(tmp_path):
    for address, local in (("[::1]:0", True), ("[::]:0", False)):
        with LiveServer([tmp_path], address) as server:
            assert server.is_local == local
            assert server.url == f"http://[::1]:{server.server_address[1]}/"
            assert urllib.request.urlopen(f"{server.url}metrics").status == 200


def test_it_listens_on_this_machine_only_unless_told_otherwise(tmp_path):
    with LiveServer([tmp_path], "0") as server:
        assert (server.server_address[0], server.is_local) == ("127.0.0.1", True)
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"
    with LiveServer([tmp_path], "0.0.0.0:0") as server:
        assert not server.is_local
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"
        assert ask(server, "/state", Host="node17:9464")[0] == 200, "whoever opens it to others gives it a name"


@pytest.mark.parametrize(("words", "option"), [(["live", "{}"], "--listen"), (["train", "--", __file__], "--live")])
def test_a_port_in_use_is_refused_before_anything_starts(tmp_path, capsys, words, option):
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command, *rest = [word.format(tmp_path) for word in words]
        assert main([command, option, port, *rest]) == 2
    assert capsys.readouterr().err == (
        f"dlcp {command}: {option} cannot listen on 127.0.0.1 port {port}: Address already in use; "
        "choose another port, or 0 for a free one\n"
    )


@pytest.mark.parametrize("address", ["http", "203.0.113.1:0", "nowhere.invalid:0"])
def test_an_address_that_is_not_ours_is_refused(address, capsys):
    assert main(["live", "--listen", address, "folder"]) == 2
    assert capsys.readouterr().err.startswith("dlcp live: --listen ")


def test_a_folder_that_is_not_there_yet_is_named(tmp_path, capsys, monkeypatch):
    ended = SimpleNamespace(Event=lambda: SimpleNamespace(wait=lambda: True))
    monkeypatch.setattr("dlcp.commands.live.threading", ended)
    monkeypatch.setattr("dlcp.commands.live.signal.signal", lambda *_: None)
    (tmp_path / "there").mkdir()
    assert main(["live", "--listen", "0", str(tmp_path / "there"), str(tmp_path / "nofolder")]) == 0
    said = capsys.readouterr().err
    assert f"{tmp_path}/nofolder does not exist yet; the page waits for ranks to write there" in said
    assert f"{tmp_path}/there does not" not in said
