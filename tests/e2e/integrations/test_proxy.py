"""The proxy's process before two HTTP servers of each kind, which answer as a test says."""

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvbus.integrations.proxy import app
from kvbus.spawn import Child
from tests.support.agents import wait_logged, wait_until

COMMAND = (sys.executable, "-m", "kvbus.integrations.proxy")
WITHIN_S = 60.0
COMPLETIONS = "/v1/completions"
ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0.0}
ONE_TOKEN = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
TICKET = {"do_remote_prefill": True, "endpoint": "tcp://10.0.0.1:5600", "größe": [1, [2, 3.5]]}
ANSWER = {"choices": [{"text": "abc"}]}
MISTAKE = {"error": {"message": "no such model", "type": "NotFoundError"}}
EVENT = b'data: {"a": "h\xc3\xa9"}\n\n'
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Asked(BaseHTTPRequestHandler):
    """One request that a server got; ``gone`` when the proxy closed the connection."""

    protocol_version = "HTTP/1.1"
    kind: "Kind"

    def do_GET(self) -> None:
        says(self.headers["host"])(self)

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.gone = Event()
        asked = copy.copy(self)  # this handler serves the next request of its connection, too
        self.kind.asked.append(asked)
        self.kind.does(asked)


Behaviour = Callable[[Asked], None]
Keys = Mapping[str, Any]


def says(*parts: Any, status: int = 200, **headers: str) -> Behaviour:
    """Send each part as a chunk, bytes or JSON; wait for events; leave the rest to a function."""

    def behave(asked: Asked) -> None:
        asked.send_response(status)
        for name, value in {"transfer_encoding": "chunked", **headers}.items():
            asked.send_header(name.replace("_", "-"), value)
        asked.end_headers()
        for part in (*parts, b""):
            if isinstance(part, Event):
                assert part.wait(WITHIN_S)
            elif callable(part):
                part(asked)
                break
            else:
                text = part if isinstance(part, bytes) else json.dumps(part).encode()
                asked.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))

    return behave


def offers(params: object = TICKET) -> Behaviour:
    return says({**ANSWER, "kv_transfer_params": params})


def hangs(asked: Asked) -> None:
    """Wait until the proxy closes the connection."""
    if asked.rfile.read(1) == b"":
        asked.gone.set()


def breaks_off(asked: Asked) -> None:
    asked.connection.shutdown(socket.SHUT_RDWR)


class Kind:
    """Both servers of a kind; a behaviour answers their requests."""

    def __init__(self) -> None:
        self.does, self.asked = offers(), list[Asked]()
        handler = type("Handler", (Asked,), {"kind": self})
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        self.hosts = [f"127.0.0.1:{server.server_port}" for server in self.servers]
        for server in self.servers:
            Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [asked.body for asked in self.asked]


class Site:
    """A proxy with these options, its servers except those of ``without``, and a client."""

    def __init__(self, folder: Path, *options: str, without: str = "") -> None:
        self.kinds = {"prefill": Kind(), "decode": Kind()}
        self.prefill, self.decode = self.kinds.values()
        own = {role: kind.hosts for role, kind in self.kinds.items() if role != without}
        servers = [f"--{role}=http://{host}" for role, hosts in own.items() for host in hosts]
        command = [*COMMAND, "--port=0", *options, *servers]
        self.process = Child.start("proxy", command, log=folder / "log")
        wait_logged(self.process, '"proxy.started"', WITHIN_S)
        url = json.loads(self.process.log_text().splitlines()[0])["url"]
        self.client = httpx.Client(base_url=url, timeout=WITHIN_S, trust_env=False)
        self.begin()

    def begin(self) -> None:
        """Be as at first, for the next test."""
        self.prefill.does, self.decode.does = offers(), says(ANSWER)
        self.prefill.asked, self.decode.asked = [], []
        self.request_id = self.client.headers["x-request-id"] = uuid.uuid4().hex

    def ended(self) -> Any:
        """The log line of the test's request; an answer comes before it."""

        def lines() -> list[str]:
            whole = self.process.log_text().split("\n")[:-1]
            return [line for line in whole if self.request_id in line]

        wait_until(lines, "its line", WITHIN_S)
        return json.loads(lines()[-1])

    def ask(self, path: str = COMPLETIONS, *, headers: Any = None, **keys: Any) -> Any:
        return self.client.post(path, json={**ASKED, **keys}, headers=headers)

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.end()
        for server in (*self.prefill.servers, *self.decode.servers):
            server.shutdown()
            server.server_close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("proxy")) as site:
        yield site


@pytest.fixture
def site(shared: Site) -> Site:
    shared.begin()
    return shared


HANDED_OVER: list[tuple[Keys, Keys]] = [
    ({"stream_options": {"include_usage": True}, "min_tokens": 9}, {}),
    ({"max_completion_tokens": 30}, {"max_completion_tokens": 1}),
    ({"n": 1, "prompt": [[1, 2]]}, {"n": 1, "prompt": [[1, 2]]}),
    ({"kv_transfer_params": {"offer_id": "another's"}}, {}),
]
"""Keys of the client's request, and those that prefill gets besides `ONE_TOKEN`."""


@pytest.mark.parametrize(("keys", "to_prefill"), HANDED_OVER)
def test_prefill_gets_one_token_and_decode_gets_the_ticket(
    site: Site, keys: Keys, to_prefill: Keys
) -> None:
    got = site.ask("/v1/chat/completions", **keys)

    assert (got.status_code, got.json()) == (200, ANSWER)
    assert site.prefill.bodies == [{**ASKED, **to_prefill, **ONE_TOKEN}]
    assert site.decode.bodies == [{**ASKED, **keys, "kv_transfer_params": TICKET}]
    assert site.prefill.asked[0].path == site.decode.asked[0].path == "/v1/chat/completions"
    line = site.ended()
    assert (line["outcome"], line["handover"]) == ("answered", "handed_over")
    assert 0 < line["prefill_s"] < line["first_token_s"] <= line["total_s"]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"n": 2}, "several_sequences"),
        ({"use_beam_search": True}, "beam_search"),
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"prompt_embeds": "AAAA"}, "several_prompts"),
        ({"prompt_logprobs": 0}, "prompt_asked_back"),
    ],
)
def test_what_one_ticket_cannot_carry_is_served_by_decode_alone(
    site: Site, keys: Keys, reason: str
) -> None:
    got = site.ask(**keys, kv_transfer_params={"offer_id": "another's"})

    assert got.status_code == 200
    assert (site.prefill.bodies, site.decode.bodies) == ([], [{**ASKED, **keys}])
    assert site.ended()["handover"] == reason


@pytest.mark.parametrize(
    ("behaviour", "handover"),
    [
        (says(MISTAKE, status=500), "prefill_failed"),
        (says({}, status=307, location="http://elsewhere/"), "prefill_failed"),
        (breaks_off, "prefill_failed"),
        (says(b'{"choices":', breaks_off), "prefill_failed"),
        (says([1]), "prefill_failed"),
        (offers(None), "not_offered"),
        (offers({}), "not_offered"),
    ],
)
def test_without_a_ticket_decode_computes(site: Site, behaviour: Behaviour, handover: str) -> None:
    site.prefill.does = behaviour

    got = site.ask()

    assert (got.status_code, got.json(), site.decode.bodies) == (200, ANSWER, [ASKED])
    assert site.ended()["handover"] == handover


@pytest.mark.parametrize(
    ("role", "behaviour", "status"),
    [
        ("prefill", says(MISTAKE, status=429, retry_after="3"), 429),
        ("decode", says(MISTAKE, status=429, retry_after="3"), 429),
        ("decode", says(MISTAKE, status=500), 500),
        ("decode", breaks_off, 502),
    ],
)
def test_errors_of_client_and_decode_reach_the_client(
    site: Site, role: str, behaviour: Behaviour, status: int
) -> None:
    site.kinds[role].does = behaviour

    got = site.ask()

    line = site.ended()
    assert got.status_code == line["status"] == status
    assert (len(site.prefill.asked), len(site.decode.asked)) == (1, int(role == "decode"))
    assert got.headers[f"x-kvbus-{role}"] == line[role]
    assert got.headers.get("retry-after") == ("3" if status == 429 else None)
    assert got.json() == MISTAKE or line[role] in got.json()["error"]["message"]


def test_a_body_that_is_no_request_is_refused_by_the_proxy(site: Site) -> None:
    for text in (b"", b"\xff\xfe", b"1", b"[1]"):
        got = site.client.post(COMPLETIONS, content=text)
        assert (got.status_code, got.json()["error"]["code"], site.ended()["status"]) == (400,) * 3
    assert site.prefill.asked == site.decode.asked == []


def test_key_id_and_trace_reach_servers_with_unchanged_bodies(site: Site) -> None:
    text = b'{"choices":  [{"text": "h\xc3\xa9"}], "kv_transfer_params": null}\n'
    site.decode.does = says(text)

    got = site.ask(headers={"Authorization": "Bearer k", "traceparent": TRACE})
    other = site.ask(headers={"X-Request-Id": "x" * 201, "traceparent": "wrong"})

    assert (got.content, got.headers["x-request-id"]) == (text, site.request_id)
    for kind in (site.prefill, site.decode):
        headers = kind.asked[0].headers
        assert (headers["authorization"], headers["x-request-id"]) == ("Bearer k", site.request_id)
        assert headers["accept-encoding"] == "identity"
        assert kind.asked[1].headers["x-request-id"] == other.headers["x-request-id"]
    params = [body["kv_transfer_params"] for body in site.prefill.bodies]
    assert params == [{"do_remote_decode": True, "traceparent": TRACE}, {"do_remote_decode": True}]
    assert len(other.headers["x-request-id"]) == 32
    assert site.ask("/v1/embeddings").status_code == 404


def test_requests_and_questions_for_models_go_to_servers_in_turn(site: Site) -> None:
    assert [site.ask().status_code for _ in range(4)] == [200] * 4

    for kind in (site.prefill, site.decode):
        hosts = [asked.headers["host"] for asked in kind.asked]
        assert hosts in (2 * kind.hosts, 2 * kind.hosts[::-1])
    assert {site.client.get("/v1/models").json() for _ in range(2)} == set(site.decode.hosts)


def test_a_prefill_server_that_is_closed_is_done_without(tmp_path: Path) -> None:
    with Site(tmp_path, "--prefill=http://127.0.0.1:1") as site:  # beside two that are well
        assert [site.ask().status_code for _ in range(3)] == [200] * 3
        health = site.client.get("/health").json()

    given = [body.get("kv_transfer_params") for body in site.decode.bodies]
    assert given == [None, TICKET, TICKET]
    assert health.pop("ready")
    assert [url for url in health if health[url] != "healthy"] == ["http://127.0.0.1:1"]


def test_without_a_decode_server_the_client_is_told_which_one(tmp_path: Path) -> None:
    with Site(tmp_path, "--decode=http://127.0.0.1:1", without="decode") as site:
        got = site.ask()
        assert "decode server http://127.0.0.1:1 failed" in got.json()["error"]["message"]
        statuses = [site.client.get(path).status_code for path in ("/health", "/v1/models")]

    assert (got.status_code, statuses) == (502, [503, 503])


def test_a_silent_server_has_failed(tmp_path: Path) -> None:
    with Site(tmp_path, "--timeout=0.5") as site:
        site.prefill.does = hangs
        got = site.ask()
        assert (got.status_code, got.json()) == (200, ANSWER)
        assert site.ended()["handover"] == "prefill_failed"

        site.begin()
        site.decode.does = hangs
        got = site.ask()
        assert got.status_code == 502
        assert "has sent nothing for 0.5 s" in got.json()["error"]["message"]
        assert site.decode.asked[0].gone.wait(WITHIN_S)


def test_client_gets_each_part_at_once_and_no_end_after_a_crash(site: Site) -> None:
    parts, gates = (EVENT, b'data: {"b"', b": 1}\n\n"), [Event() for _ in range(4)]
    steps = [step for pair in zip(gates[:3], parts, strict=True) for step in pair]
    site.decode.does = says(*steps, gates[3], breaks_off, content_type="text/event-stream")

    with site.client.stream("POST", COMPLETIONS, json=ASKED) as answer:  # headers came first
        got, raw = [], answer.iter_raw()
        for gate in gates[:3]:
            gate.set()
            got.append(next(raw))
        gates[3].set()
        with pytest.raises(httpx.RemoteProtocolError):
            next(raw)
    of_stream = site.ended()
    site.begin()
    site.decode.does = says(b'{"choices":', breaks_off)
    with pytest.raises(httpx.RemoteProtocolError):
        site.ask()

    assert (tuple(got), answer.headers["content-type"]) == (parts, "text/event-stream")
    assert (of_stream["outcome"], of_stream["status"]) == ("answered", 200)
    assert of_stream["trouble"].startswith(f"decode server {of_stream['decode']} failed")


@pytest.mark.parametrize("stage", ["its request", "prefill", "decode", "a stream"])
def test_client_abort_reaches_servers_and_tickets_are_used_once(site: Site, stage: str) -> None:
    site.prefill.does = hangs if stage == "prefill" else offers()
    site.decode.does = says(EVENT, hangs) if stage == "a stream" else hangs
    asked = {"its request": (0, 0), "prefill": (1, 0)}.get(stage, (1, 1))
    text, base = json.dumps(ASKED).encode(), site.client.base_url
    length = 10_000 if stage == "its request" else len(text)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nX-Request-Id: {site.request_id}\r\n"

    def have_asked() -> bool:
        return (len(site.prefill.asked), len(site.decode.asked)) == asked

    with socket.create_connection((base.host, base.port or 0), WITHIN_S) as connection:
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % length + text)
        wait_until(have_asked, "its servers are asked", WITHIN_S)
        got = b""
        while stage == "a stream" and EVENT not in got:
            got += connection.recv(4096)

    assert site.ended()["outcome"] == "aborted"
    assert have_asked()
    for one in (site.decode.asked or site.prefill.asked)[:1]:
        assert one.gone.wait(WITHIN_S)


@pytest.mark.parametrize(
    ("number", "is_endless"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGTERM, True)],
)
def test_after_a_signal_requests_end_and_endless_ones_abort(
    tmp_path: Path, number: signal.Signals, is_endless: bool
) -> None:
    with Site(tmp_path) as site, ThreadPoolExecutor(1) as threads:
        site.decode.does = hangs if is_endless else says(EVENT, gate := Event(), EVENT)
        asked = threads.submit(site.ask)
        wait_until(lambda: site.decode.asked, "decode is asked", WITHIN_S)

        site.process.process.send_signal(number)

        if is_endless:
            assert site.decode.asked[0].gone.wait(WITHIN_S)
            with pytest.raises(httpx.HTTPError):
                asked.result(WITHIN_S).raise_for_status()
        else:
            gate.set()
            assert asked.result(WITHIN_S).content == 2 * EVENT
            assert site.ended()["outcome"] == "answered"
        assert site.process.process.wait(WITHIN_S) == 0 or is_endless


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("--decode http://a:2", 2, "Missing option '--prefill'"),
        ("--decode http://a:2 --prefill 127.0.0.1:8100", 2, "'--prefill': '127.0.0.1:8100' is not"),
        ("--decode ftp://host --prefill http://a:1", 2, "'--decode': 'ftp://host' is not"),
        ("--decode http://[::1 --prefill http://a:1", 2, "'--decode': 'http://[::1' is not"),
        ("--decode http://a:2 --prefill http://a:1 --timeout 0", 2, "--timeout"),
        ("--decode http://a:2 --prefill http://a:1 --host 192.0.2.1", 1, "on 192.0.2.1 port 8000"),
    ],
)
def test_a_wrong_option_is_named(arguments: str, status: int, said: str) -> None:
    ended = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})

    assert (ended.exit_code, said in ended.stderr) == (status, True)
    assert isinstance(ended.exception, SystemExit)  # no traceback


def test_missing_package_is_named_with_its_install_command(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError('No module named uvicorn', name='uvicorn')"
    (tmp_path / "uvicorn.py").write_text(missing)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}

    command = [*COMMAND, "--help"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=env)

    assert ended.returncode == 1
    assert ended.stderr == "error: the proxy needs uvicorn: pip install 'kvbus[proxy]'\n"
