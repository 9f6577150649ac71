from __future__ import annotations

import base64
import os
import socket
import threading

import pytest

from mdata.errors import MdataError, UsageError
from mdata.object_storage.address import parse_address
from mdata.object_storage.origin_guard import OriginGuard, authority
from mdata.object_storage.reading import list_objects, look_at_object, read_range
from mdata.object_storage.uploading import put_file
from tests.helpers.object_server import answering

SECRET = "TOBEHIDDEN"
ROWS = b'{"text": "hello"}\n' * 9
FILE = {"ETag": '"v1"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
CLOUDS = {
    "s3": {
        "AWS_ENDPOINT_URL": "{url}",
        "AWS_ACCESS_KEY_ID": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_SERVER_SIDE_ENCRYPTION": "sse-c",
        "AWS_SSE_CUSTOMER_KEY_BASE64": base64.b64encode(SECRET.encode().ljust(32)).decode(),
    },
    "az": {
        "AZURE_STORAGE_ENDPOINT": "{url}",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_TOKEN": f"sv=1&sig={SECRET}",
    },
}


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Sets the variables of a cloud, and no others."""
    pytest.importorskip("obstore")
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")  # would send requests past the guard

    def use(variables, url):
        for name, value in variables.items():
            monkeypatch.setenv(name, value.format(url=url))

    return use


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_no_secret_follows_a_redirect(environment, tmp_path, cloud, host):
    elsewhere: list[object] = []
    other = answering(lambda request: elsewhere.append(request.headers) or (200, FILE, ROWS))
    first: list[str] = []

    def redirects(request):
        first.append(f"{request.path} {request.headers}")
        return 307, {"Location": f"{other.replace('127.0.0.1', host)}/x", "Set-Cookie": f"c={SECRET}"}, b""

    environment(CLOUDS[cloud], answering(redirects))
    address = parse_address(f"{cloud}://bucket/a.jsonl")
    (tmp_path / "a").write_bytes(ROWS)
    for ask in (
        lambda: look_at_object(address),
        lambda: list_objects(parse_address(f"{cloud}://bucket/")),
        lambda: put_file(tmp_path / "a", address, file_hash=None),
    ):
        with pytest.raises(UsageError, match="redirects to another host") as refused:
            ask()
        assert SECRET not in str(refused.value)
    assert SECRET in first[0] and not elsewhere


def test_files_of_the_hub_come_from_other_hosts_without_the_token(environment):
    seen: list[str] = []
    content = answering(lambda request: seen.append(str(request.headers)) or (200, FILE, ROWS))
    hub = answering(lambda request: (302, {"Location": f"{content}/blob?Signature=of-the-hub"}, b""))
    environment({"HF_ENDPOINT": "{url}", "HF_TOKEN": SECRET}, hub)
    facts = look_at_object(parse_address("hf://datasets/o/n/a.jsonl"))
    assert read_range(facts, 0, stop=len(ROWS)) == ROWS
    assert len(seen) == 2 and not any(SECRET in headers for headers in seen)


def test_the_first_place_is_the_origin_and_credentials_come_from_their_services():
    guard = OriginGuard(
        {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:4711/role",
            "AWS_ENDPOINT_URL": "http://elsewhere:81",
            "UNRELATED": "http://elsewhere:82",
        }
    )
    for place in (
        "169.254.169.254:80",
        "127.0.0.1:4711",
        "sts.eu-west-1.amazonaws.com:443",
        "oauth2.googleapis.com:443",
    ):
        assert guard.allows(place)
    assert guard.origin is None
    assert guard.allows("b.s3.eu-west-1.amazonaws.com:443") and guard.allows("b.s3.eu-west-1.amazonaws.com:443")
    for place in (
        "elsewhere:81",
        "elsewhere:82",
        "b.s3.eu-west-1.amazonaws.com:80",
        "evil.b.s3.eu-west-1.amazonaws.com:443",
        "sts.evil.com:443",
        "sts.amazonaws.com.evil.com:443",
        "169.254.169.254:81",
    ):
        assert not guard.allows(place), place
        assert guard.refused == place
    guard.shutdown()


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("https://Host", "host:443"),
        ("http://host", "host:80"),
        ("http://user:word@host:81/path", "host:81"),
        ("https://[::1]:5", "[::1]:5"),
    ],
)
def test_authorities(url, place):
    assert authority(url) == place


def _echo():
    """host:port of a server that sends back what it gets, after what it got first."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            connection, _ = listener.accept()
            while data := connection.recv(1 << 16):
                connection.sendall(data)
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _tunnel(guard, place):
    connection = socket.create_connection(guard.server_address)
    connection.settimeout(20)
    connection.sendall(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
    return connection, connection.recv(1 << 16)


def test_tunnels_carry_everything_to_the_origin_and_nothing_elsewhere(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    guard, here, there = OriginGuard({}), _echo(), _echo()
    connection, answer = _tunnel(guard, here)
    assert answer.startswith(b"HTTP/1.1 200 ")
    sent = os.urandom(3_000_000)
    threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()
    received = b""
    while len(received) < len(sent):
        received += connection.recv(1 << 20)
    assert received == sent
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""  # the end is passed on
    refused, answer = _tunnel(guard, there)
    assert answer.startswith(b"HTTP/1.1 497 ") and refused.recv(1) == b""
    guard.shutdown()


def test_connections_wait_for_a_busy_guard(monkeypatch):
    """A store opens many at once; Linux lets one that finds no room in the queue try again a second later."""
    go_on = threading.Event()
    monkeypatch.setattr(OriginGuard, "process_request", lambda *_: go_on.wait(60))
    guard = OriginGuard({})
    try:
        for _ in range(64):
            socket.create_connection(guard.server_address, timeout=0.9).detach()
    finally:
        go_on.set()
        guard.shutdown()


def test_the_proxy_of_the_environment_is_used(monkeypatch):
    proxy = _echo()  # what it sends back is no 200, so the way ends there, but it has been asked
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("https_proxy", f"http://user:word@{proxy}")
    guard = OriginGuard({})
    _, answer = _tunnel(guard, "storage.invalid:443")
    assert answer.startswith(b"HTTP/1.1 597 ")
    guard.shutdown()


def _s3_list(entries, token):
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>2015-10-21T07:28:00.000Z</LastModified></Contents>"
        for key in entries
    )
    following = f"<NextContinuationToken>{token}</NextContinuationToken>"
    return f"<ListBucketResult><IsTruncated>true</IsTruncated>{following}{contents}</ListBucketResult>"


def _az_list(entries, token):
    blobs = "".join(
        f"<Blob><Name>{key}</Name><Properties><Last-Modified>Wed, 21 Oct 2015 07:28:00 GMT</Last-Modified>"
        "<Content-Length>1</Content-Length><Content-Type>x</Content-Type></Properties></Blob>"
        for key in entries
    )
    return f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{token}</NextMarker></EnumerationResults>"


LISTS = {"s3": _s3_list, "az": _az_list}


@pytest.mark.parametrize("cloud", LISTS)
@pytest.mark.parametrize("entries", [("t/a",), ("t/a", "t/b"), ()])
def test_a_list_that_repeats_a_page_is_refused(environment, monkeypatch, cloud, entries):
    monkeypatch.setattr("mdata.object_storage.reading.LIST_TIMEOUT_S", 0.5)
    requests: list[str] = []

    def lists(request):
        requests.append(request.path)
        return 200, {"Content-Type": "application/xml"}, LISTS[cloud](entries, "same").encode()

    environment(CLOUDS[cloud], answering(lists))
    with pytest.raises(MdataError, match="the list does not end"):
        list_objects(parse_address(f"{cloud}://bucket/t/"))
    assert not entries or len(requests) == 2


def test_an_object_and_the_mark_of_a_folder_may_have_one_name(environment):
    """Consoles and file systems on S3 make such marks; obstore gives both the same path."""

    def lists(request):
        page = _s3_list(["t/x", "t/x/", "t/x/a"], "").replace("true", "false")
        return 200, {}, page.replace("<Key>t/x/</Key><Size>1", "<Key>t/x/</Key><Size>0").encode()

    environment(CLOUDS["s3"], answering(lists))
    facts = list_objects(parse_address("s3://bucket/t/"))
    assert [(one.address.key, one.size_bytes) for one in facts] == [("t/x", 1), ("t/x/a", 1)]


def test_a_list_that_goes_on_for_ever_is_refused(environment, monkeypatch):
    monkeypatch.setattr("mdata.object_storage.reading.MOST_OBJECTS", 20)
    requests: list[str] = []

    def lists(request):
        requests.append(request.path)
        return 200, {}, _s3_list([f"t/{len(requests)}"], f"token{len(requests)}").encode()

    environment(CLOUDS["s3"], answering(lists))
    with pytest.raises(MdataError, match="the list does not end"):
        list_objects(parse_address("s3://bucket/t/"))
    assert len(requests) == 21
