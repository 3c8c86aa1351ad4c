"""Access to the routes: with a token, or from the same machine if the server listens only on
loopback."""

from __future__ import annotations

import os
from argparse import Namespace

import pytest
from starlette.datastructures import Headers

from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.connectors.vllm.routes.access import Access, Refusal, is_loopback

LOCAL = {"host": "127.0.0.1:8000"}
TOKEN = {ADMIN_TOKEN: "s3cret"}


def access(env: dict[str, str] | None = None, **args: str) -> Access:
    return Access.of(env or {}, Namespace(**args))


def refused(rule: Access, headers: dict[str, str]) -> int:
    with pytest.raises(Refusal) as caught:
        rule.check(Headers(headers))
    assert caught.value.sentence.endswith(".")
    assert "s3cret" not in caught.value.sentence + repr(rule)
    return caught.value.status


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"])
def test_local_programs_may_ask_a_server_on_loopback(host: str) -> None:
    assert is_loopback(host)
    access(host=host).check(LOCAL)
    access({ADMIN_TOKEN: ""}, host=host).check({"host": "localhost"})


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.1.2.3", "localhost.example.com", "x"])
def test_beyond_loopback_no_client_is_served_without_a_token(host: str) -> None:
    assert not is_loopback(host)
    assert refused(access(host=host), LOCAL) == 403


def test_a_server_without_a_host_listens_everywhere() -> None:
    assert refused(Access.of({}, Namespace(host=None, uds=None)), LOCAL) == 403
    assert refused(Access.of({}, Namespace()), LOCAL) == 403
    Access.of({}, Namespace(host=None, uds="/run/vllm.sock")).check({"host": "localhost"})


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example.com"},  # a name that resolves to loopback
        {"host": "evil.example.com:8000"},
        {**LOCAL, "origin": "https://evil.example.com"},
        {**LOCAL, "origin": "null"},
        {**LOCAL, "x-forwarded-for": "203.0.113.9"},
        {**LOCAL, "forwarded": "for=203.0.113.9"},
        {**LOCAL, "x-forwarded-host": "example.com"},
        {**LOCAL, "x-forwarded-proto": "https"},
        {**LOCAL, "x-real-ip": "203.0.113.9"},
        {**LOCAL, "via": "1.1 proxy"},
        {**LOCAL, "referer": "https://evil.example.com/"},
        {**LOCAL, "sec-fetch-site": "cross-site"},  # sent by an <img>, a <script> or a link
        {**LOCAL, "sec-fetch-site": "same-site"},
        {**LOCAL, "sec-fetch-site": "same-origin"},
        {"host": "[::1].evil.example.com:8000"},
        {"host": "[2001:db8::1]:8000"},
        {"host": "127.0.0.1.evil.example.com"},
    ],
)
def test_web_pages_and_local_proxies_may_not_ask(headers: dict[str, str]) -> None:
    assert refused(access(host="127.0.0.1"), headers) == 403


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "localhost:8000", "LocalHost", ""],
)
def test_a_request_may_name_loopback_in_any_way(host: str) -> None:
    access(host="127.0.0.1").check(Headers({"host": host}))


def test_a_request_without_a_host_is_not_from_a_web_page() -> None:
    access(host="127.0.0.1").check(Headers({}))


def test_an_address_that_the_operator_typed_into_a_browser_is_answered() -> None:
    access(host="127.0.0.1").check(Headers({**LOCAL, "sec-fetch-site": "none"}))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_token_is_needed_wherever_there_is_one(host: str) -> None:
    rule = access(TOKEN, host=host)
    for right in ("Bearer s3cret", "bearer s3cret", "Bearer  s3cret "):
        rule.check(Headers({"authorization": right, "origin": "https://ops.example.com"}))
    for wrong in ("", "s3cret", "Bearer", "Bearer s3cre", "Basic s3cret", "Bearer s3cretx", "\xff"):
        assert refused(rule, {**LOCAL, "authorization": wrong}) == 401
    assert refused(rule, LOCAL) == 401


def sent(token: bytes) -> Headers:
    return Headers(raw=[(b"authorization", b"Bearer " + token)])


@pytest.mark.parametrize(
    "token",
    ["geheim ü", "voilà", "čaj", "x\u00e0", "ends in Å", "naïve…", "\u00a0", "a\u0085", "x\u3000"],
)
def test_every_token_that_can_be_set_can_be_used(token: str) -> None:
    """A token may contain any characters. Its last byte in UTF-8 may be A0 or 85, which are spaces
    in Latin-1 and must not be stripped."""
    rule = access({ADMIN_TOKEN: token}, host="0.0.0.0")
    rule.check(sent(token.encode()))
    assert refused(rule, dict(sent(token.encode()[:-1]))) == 401


def test_a_token_that_is_not_valid_utf8_can_be_used() -> None:
    rule = access({ADMIN_TOKEN: os.fsdecode(b"\xff\xe0")}, host="0.0.0.0")
    rule.check(sent(b"\xff\xe0"))
    assert refused(rule, dict(sent(b"\xff\xe1"))) == 401


@pytest.mark.parametrize("token", ["s3cret\n", " s3cret", "s3cret\r\n", "\ts3cret "])
def test_a_token_read_from_a_file_keeps_no_line_end(token: str) -> None:
    access({ADMIN_TOKEN: token}, host="0.0.0.0").check(sent(b"s3cret"))


@pytest.mark.parametrize("given", [b"", b" ", b"\n"])
def test_a_blank_token_grants_no_access(given: bytes) -> None:
    assert refused(access({ADMIN_TOKEN: " \n"}, host="127.0.0.1"), dict(sent(given))) == 401
