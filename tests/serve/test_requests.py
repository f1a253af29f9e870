"""Hostile clients: every refusal is a status 4xx in OpenAI's form, and other clients are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from math import inf, nan
from typing import Any

import httpx
import pytest

from adt_tree import Pipeline
from serve.api_errors import ApiError
from serve.app import create_app
from serve.metrics import Metrics
from serve.settings import Settings
from tests.support.service import PROMPT, Running, running, wait_for

KEY = "kéy-of-the-test"
NAME = "img.example.com"
SETTINGS = Settings(slots=1, queue=10, max_prompt_tokens=32, timeout_s=1.0, server_names=(NAME,))


def check_form(answer: httpx.Response, status: int, param: str | None = None) -> str:
    """Checks that an answer is an error as OpenAI writes it. Returns its message."""
    assert answer.status_code == status, answer.text
    content = answer.json()
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    assert content["error"]["param"] == param and content["error"]["message"]
    assert "\n" not in content["error"]["message"] and "pydantic" not in answer.text
    assert "default-src" in answer.headers["Content-Security-Policy"]
    return content["error"]["message"]


WRONG: list[tuple[str, Any]] = [
    ("n", 10**6), ("n", "4"), ("n", 10**400), ("seed", -1), ("temperature", 10**9), ("temperature", nan),
    ("guidance", -inf), ("top_p", 0.0), ("top_k", -1), ("output_format", "../../etc/passwd"),
    ("background", "transparent"), ("response_format", "url"), ("size", "1024x1024"), ("method", {"a": 1}),
    ("method", "jacobi"), ("lantern", {"k": 10**6}), ("lantern", {"table": "x"}), ("partial_images", 4),
    ("partial_images", 1), ("partial_rows", 0), ("partial_rows", 1), ("output_compression", 50),
    ("quality", "best"), ("stream", "yes"), ("prompt", 5), ("prompt", " \n"), ("prompt", "\ud800"),
    ("prompt", "x" * 400), ("image", "x"), ("__class__", 1), ("\ud800", 1),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: ascii(value)[:30])
def test_wrong_fields(live: Running, field: str, value: Any) -> None:
    check_form(live.post({"prompt": PROMPT, field: value}), 400, field)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *((body, None) for body in (b"", b"[]", b"\xff\xfe", b"[" * 20000)),
        (b'{"prompt": "sun", "temperature": 1%s}' % (b"0" * 5000), None),
        (b'{"prompt": "sun", "n": 1e999}', "n"),
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_bodies_that_are_no_request(live: Running, body: bytes, param: str | None) -> None:
    check_form(live.post(body), 400, param)


def test_missing_and_unfit(live: Running) -> None:
    check_form(live.post({}), 400, "prompt")
    other = live.post({"prompt": PROMPT, "model": "dall-e-3"})
    check_form(other, 404, "model")
    assert other.json()["error"]["code"] == "model_not_found"
    check_form(live.post({"prompt": PROMPT, "method": "ar", "lantern": True}), 400, "lantern")
    both = {"partial_images": 1, "partial_rows": 1, "stream": True}
    check_form(live.post({"prompt": PROMPT, **both}), 400, "partial_rows")
    null = {"n": None, "model": None, "size": None, "user": None, "seed": None}
    assert live.post({"prompt": PROMPT, **null}).status_code == 200


def test_large_bodies(live: Running) -> None:
    """The bodies are one of 100 MB, one with a prompt of 1 MB, and one of 200 kB without a stated length."""
    check_form(live.post(b"x" * 100_000_000), 413)
    check_form(live.post({"prompt": "x" * 1_000_000}), 413)

    def parts() -> Iterator[bytes]:
        yield from [b"x" * 50_000] * 4

    check_form(httpx.post(f"{live.site}/v1/images/generations", content=parts(),
                          headers={"Content-Type": "application/json"}), 413)  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example:80"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": ""}, 403),
        ({"X-Forwarded-For": "127.0.0.1"}, 403),
        ({"X-Real-IP": "10.0.0.9"}, 403),
        ({"Forwarded": "for=10.0.0.9"}, 403),
    ],
)
def test_headers_that_are_refused(live: Running, headers: dict[str, str], status: int) -> None:
    check_form(live.post({"prompt": PROMPT}, headers=headers), status)


def test_headers_that_pass(live: Running) -> None:
    for host in ("localhost:1", "[::1]:1", "10.0.0.1", NAME, f"{NAME}:1"):
        assert live.post({"prompt": PROMPT}, headers={"Host": host}).status_code == 200


def test_pages_of_other_sites_may_not_call(live: Running) -> None:
    """A browser asks first whether such a page may send JSON, and other types are refused."""
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    asked = httpx.options(f"{live.site}/v1/images/generations", headers=headers)
    assert asked.status_code == 405
    for answer in (asked, live.post({"prompt": PROMPT}, headers={"Origin": "http://evil.example"})):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_routes_that_are_not_there(live: Running) -> None:
    outside = "/page.js/..%2f..%2fmain.py"
    for path in ("/docs", "/openapi.json", "/v1/images/edits", outside, "//", "/health/"):
        check_form(httpx.get(live.site + path), 404)
    check_form(httpx.get(f"{live.site}/v1/images/generations"), 405)
    check_form(httpx.delete(f"{live.site}/health"), 405)


def raw(live: Running, data: bytes) -> socket.socket:
    """Returns a connection on which these bytes were sent."""
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=20)
    connection.sendall(data)
    return connection


def everything(connection: socket.socket) -> bytes:
    """Returns the bytes that arrive until the server closes the connection."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


HEAD = b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_http_1_0_without_a_host(live: Running, path: str) -> None:
    """HAProxy asks so for /health. A browser, whose pages may be of another site, always sends a host."""
    answer = everything(raw(live, f"GET {path} HTTP/1.0\r\n\r\n".encode()))
    assert answer.startswith(b"HTTP/1.1 200")


def test_half_a_body(live: Running) -> None:
    answer = everything(raw(live, HEAD + b'Content-Length: 50\r\n\r\n{"prompt": "su'))
    assert b" 408 " in answer.partition(b"\r\n")[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_client_that_leaves_within_its_body(
    live: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody reads the answer, so all that counts is that it is no fault of the server."""
    answered, json_of = list[ApiError](), ApiError.response.fget

    def noted(error: ApiError) -> Any:
        answered.append(error)
        return json_of(error)

    monkeypatch.setattr(ApiError, "response", property(noted))
    raw(live, HEAD + b'Content-Length: 50\r\n\r\n{"prompt": "su').close()
    wait_for(lambda: bool(answered))
    assert answered[0].status == 400 and not caplog.records


def test_bytes_that_are_no_http(live: Running) -> None:
    for data in (b"\x16\x03\x01\x02\x00" * 9 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                 b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n"):  # fmt: skip
        answer = everything(raw(live, data))
        assert not answer or answer.startswith(b"HTTP/1.1 400 "), answer


def test_the_key(pipe: Pipeline) -> None:
    with running(pipe, Settings(slots=1, queue=10, max_prompt_tokens=32, api_key=KEY)) as live:
        bearer = f"Bearer {KEY}".encode()
        keys = (None, b"Bearer wrong", b"Basic " + KEY.encode(), b"Bearer k\xe9y", KEY.encode(), b"Bearer")
        for key in (*keys, bearer + b"x", bearer[:-1]):
            headers = [(b"Content-Type", b"application/json")] + ([(b"Authorization", key)] if key else [])
            address = f"{live.site}/v1/images/generations"
            check_form(httpx.post(address, content=b'{"prompt": "sun"}', headers=headers), 401)
        assert httpx.get(f"{live.site}/metrics").status_code == 401
        assert httpx.get(f"{live.site}/v1/models").status_code == 401
        for path in ("/health", "/", "/page.js"):
            assert httpx.get(live.site + path).status_code == 200
        # With a key, a proxy may forward requests.
        headers = [(b"Authorization", bearer), (b"X-Forwarded-For", b"10.0.0.9")]
        assert httpx.get(f"{live.site}/v1/models", headers=headers).status_code == 200
        for passing in (bearer, bearer.replace(b"Bearer", b"bearer")):
            passed = httpx.get(f"{live.site}/v1/models", headers=[(b"Authorization", passing)])
            assert passed.status_code == 200


def ask(pipe: Pipeline, settings: Settings, path: str, **transport: Any) -> httpx.Response:
    """Returns the answer of an application without a server, which another server may run in its own way.
    transport: more settings of httpx.ASGITransport."""

    async def get() -> httpx.Response:
        app = create_app(pipe, settings)
        async with app.router.lifespan_context(app):
            using = httpx.ASGITransport(app, **transport)
            async with httpx.AsyncClient(transport=using, base_url="http://localhost") as caller:
                return await caller.get(path)

    return asyncio.run(get())


@pytest.mark.parametrize(("client", "key", "status"), [
    (("10.0.0.9", 5), None, 403), (("::1", 5), None, 200), (("127.0.0.9", 5), None, 200), (None, None, 200),
    (("10.0.0.9", 5), KEY, 200),
])  # fmt: skip
def test_other_machines_need_a_key(
    pipe: Pipeline, client: tuple[str, int] | None, key: str | None, status: int
) -> None:
    """This holds too if another server runs the application, at any address."""
    answer = ask(pipe, Settings(slots=1, api_key=key), "/health", client=client)
    if status == 200:
        assert answer.status_code == 200
    else:
        check_form(answer, status)


def test_a_fault_of_the_code(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer is one of OpenAI's errors with the usual headers, and says nothing of the code."""
    monkeypatch.setattr(Metrics, "text", lambda _: 1 / 0)
    assert "division" not in check_form(ask(pipe, Settings(slots=1), "/metrics"), 500)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("path", "status"), [
    ("/x/v1/models", 401), ("/v1/models", 401), ("/x/metrics", 401), ("/x", 401), ("/x/x/health", 401),
    ("/xhealth", 401), ("/x/health", 200), ("/x/", 200),
])  # fmt: skip
def test_the_key_behind_a_prefix(pipe: Pipeline, path: str, status: int) -> None:
    """Another server may give the application a prefix of its paths."""
    answer = ask(pipe, Settings(slots=1, api_key=KEY), path, root_path="/x")
    assert answer.status_code == status
