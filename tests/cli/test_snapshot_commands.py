"""``tiered-kv snapshot``, ``restore`` and ``fork`` against a stub server, with real snapshots."""

from __future__ import annotations

import errno
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.snapshot_calls import HOSTILE, invoke, rows, sentence
from tests.cli.snapshot_disk import make_snapshot
from tests.top.route_server import Answer, RouteServer, refusal
from tests.vllm.routes.engines import WorkingCore
from tests.vllm.routes.test_endpoints import serve
from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.snapshot.pack import pack
from tiered_kv.snapshot.reader import find_snapshot, open_snapshot
from tiered_kv.top.route_client import NO_ROUTES, NO_TOKEN

SNAPSHOTS, RESTORES, FORKS = "/tiered_kv/snapshots", "/tiered_kv/restores", "/tiered_kv/forks"
MADE = {
    "engine": 1,
    "name": "n",
    "job": "j",
    "tokens": 1234,
    "kv_tokens": 1230,
    "pages": 80,
    "stored_bytes": 3 << 20,
    "shared_bytes": 1 << 20,
    "exact": False,
    "capture_ms": 12.25,
    "durable_ms": 1400.0,
    "cache_salt": None,
}
RESTORED = {
    "engine": 0,
    "job": "j",
    "tokens": 40,
    "kv_tokens": 40,
    "pages": 3,
    "cache_salt": None,
    "ms": 7.5,
    "others": [],
}
FORKED = {
    "engine": 0,
    "jobs": ["a", "b c"],
    "tokens": 40,
    "kv_tokens": 40,
    "cache_salt": None,
    "extra_pages": 2,
}


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_TOKEN, raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The server's snapshot folder."""
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def server(root: Path) -> Iterator[RouteServer]:
    """A stub server that creates a real snapshot of any job, and reads the snapshots that it
    restores."""
    server = RouteServer({})
    server.answers[SNAPSHOTS] = said({"folder": str(root), "snapshots": []})

    def make(body: dict[str, Any]) -> Answer:
        make_snapshot(root, body["name"], job=body["job"])
        return said({**MADE, "name": body["name"], "job": body["job"]})

    def restore(body: dict[str, Any]) -> Answer:
        with open_snapshot(find_snapshot(root, body["name"])) as snapshot:
            snapshot.verify()
            return said({**RESTORED, "job": body.get("job") or snapshot.manifest.job})

    server.work = {SNAPSHOTS: make, RESTORES: restore, FORKS: lambda body: said(FORKED)}
    with server.running():
        yield server


def said(answer: Any) -> Answer:
    return Answer(json.dumps(answer))


def test_a_snapshot_stays_under_its_name_in_the_servers_folder(
    server: RouteServer, root: Path
) -> None:
    result = invoke("snapshot", server.url, "--job", HOSTILE, "--out", "first")
    assert server.posted == [
        (
            SNAPSHOTS,
            {
                "job": HOSTILE,
                "name": "first",
                "wait_turn": False,
                "stop": False,
                "exact": False,
                "timeout_s": 60.0,
            },
        )
    ]
    found = rows(result)
    assert found["snapshot"] == "first"
    assert found["job"] == r"\x1b[2J[bold]j[/]\x0a\u202e"
    assert found["tokens"] == "1,234, 1,230 of them with KV"
    assert found["stored"] == "3.0 MiB, 1.0 MiB of it shared"
    assert found["captured in"] == "12.2 ms"
    assert (root / "first" / "manifest.json").is_file()


def test_every_option_is_passed_on(server: RouteServer) -> None:
    options = ["--wait-turn", "--stop", "--exact", "--timeout", 5, "--json"]
    result = invoke("snapshot", server.url, "--job", "j", "--out", "n", *options)
    assert json.loads(result.stdout) == MADE
    assert result.stdout.count("\n") == 1
    body = {"job": "j", "wait_turn": True, "stop": True, "exact": True, "timeout_s": 5.0}
    assert server.posted == [(SNAPSHOTS, {**body, "name": "n"})]
    server.posted.clear()
    invoke("restore", server.url, "n", "--job", "k", "--exact", "--timeout", 5)
    body = {"name": "n", "job": "k", "exact": True, "timeout_s": 5.0}
    assert server.posted == [(RESTORES, body)]
    for wrong in (-1, 3601, "x"):
        invoke("snapshot", server.url, "--job", "j", "--out", "m", "--timeout", wrong, code=2)


@pytest.mark.parametrize("name", ["put.zip", "put", "elsewhere", "without locks"])
def test_a_snapshot_is_moved_to_the_given_path(
    server: RouteServer,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    path = tmp_path / name
    if name == "without locks":
        flock = fcntl.flock

        def no_locks(fd: int, kind: int) -> None:
            if ".making-" in str(Path(f"/proc/self/fd/{fd}").readlink()):
                raise OSError(errno.ENOLCK, "No locks available")
            flock(fd, kind)

        monkeypatch.setattr(fcntl, "flock", no_locks)
    if name in ("elsewhere", "without locks"):  # on another disk
        rename = Path.rename

        def refused(self: Path, target: Path) -> Path:
            if self.parent == root:
                raise OSError(errno.EXDEV, "another disk")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", refused)
    result = invoke("snapshot", server.url, "--job", "j", "--out", path, "--json")
    told = json.loads(result.stdout)
    assert (told["path"], told["name"]) == (str(path), None)
    with open_snapshot(path) as snapshot:
        snapshot.verify()
        assert snapshot.manifest.job == "j"
    assert path.is_file() == (name == "put.zip")
    assert [one.name for one in root.iterdir() if one.name[0] != "."] == []
    assert {one.name for one in tmp_path.iterdir()} == {"root", name}
    assert "path" not in invoke("snapshot", server.url, "--job", "j", "--out", "n", "--json").stdout


def test_a_snapshot_with_an_impossible_path_is_not_created(
    server: RouteServer, tmp_path: Path, root: Path
) -> None:
    def to(path: Path) -> str:
        return sentence("snapshot", server.url, "--job", "j", "--out", path)

    (tmp_path / "there.zip").symlink_to("nowhere")
    assert "already exists" in to(tmp_path / "there.zip")
    assert "already exists" in to(root)
    assert "does not exist" in to(tmp_path / "no" / "x")
    server.answers[SNAPSHOTS] = said({"folder": str(tmp_path / "far"), "snapshots": []})
    assert "is not on this machine" in to(tmp_path / "x")
    odd: Any
    for odd in ({"folder": "relative"}, {"folder": None}, {}, []):
        server.answers[SNAPSHOTS] = said(odd)
        assert "use the same version of tiered-kv" in to(tmp_path / "x")
    server.answers[SNAPSHOTS] = refusal(501, "This server has no folder.")
    assert to(tmp_path / "x") == "This server has no folder."
    assert server.posted == []
    assert {one.name for one in tmp_path.iterdir()} == {"root", "there.zip"}


def test_a_snapshot_that_cannot_be_put_there_stays_where_it_is(
    server: RouteServer, root: Path, tmp_path: Path
) -> None:
    make = server.work[SNAPSHOTS]

    def make_and_spoil(body: dict[str, Any]) -> Answer:
        (tmp_path / "goal").rmdir()
        (tmp_path / "goal").touch()
        return make(body)

    server.work[SNAPSHOTS] = make_and_spoil
    for name in ("x", "x.zip"):
        (tmp_path / "goal").unlink(missing_ok=True)
        (tmp_path / "goal").mkdir()
        told = sentence("snapshot", server.url, "--job", "j", "--out", tmp_path / "goal" / name)
        stays = server.posted[-1][1]["name"]
        assert told.endswith(f"The snapshot stays in the server's folder as {stays}.")
        with open_snapshot(root / stays) as snapshot:
            snapshot.verify()

    server.work[SNAPSHOTS] = lambda body: said(MADE)
    (tmp_path / "goal").unlink()
    (tmp_path / "goal").mkdir()
    told = sentence("snapshot", server.url, "--job", "j", "--out", tmp_path / "goal" / "x")
    assert "is not the server's snapshot folder" in told


def test_a_snapshot_is_restored_by_its_name(server: RouteServer, root: Path) -> None:
    make_snapshot(root, "n", job="made")
    server.work[RESTORES] = lambda body: said(
        {**RESTORED, "cache_salt": "salt1", "others": [{**RESTORED, "engine": 1}]}
    )
    result = invoke("restore", server.url, "n")
    assert server.posted == [(RESTORES, {"name": "n", "exact": False, "timeout_s": 60.0})]
    assert rows(result)["send cache_salt"] == "salt1"
    engines = [line.split()[-1] for line in result.stdout.splitlines() if "engine" in line]
    assert engines == ["0", "1"]
    assert (root / "n").is_dir()


@pytest.mark.parametrize("kind", ["folder", "zip", "link"])
def test_a_snapshot_elsewhere_is_brought_in_and_removed_again(
    server: RouteServer, root: Path, tmp_path: Path, kind: str
) -> None:
    make_snapshot(tmp_path / "mine", "s", job=HOSTILE, ranks=2)
    path = tmp_path / "mine" / "s"
    if kind == "zip":
        path = tmp_path / "s.zip"
        pack(tmp_path / "mine" / "s", path)
    elif kind == "link":
        path = tmp_path / "link"
        path.symlink_to(tmp_path / "mine")
        path /= "s"
    result = invoke("restore", server.url, path, "--json")
    assert json.loads(result.stdout)["job"] == HOSTILE
    assert server.posted[0][1]["name"].startswith("cli-")
    assert list(root.iterdir()) == []
    with open_snapshot(path) as snapshot:
        snapshot.verify()

    server.work[RESTORES] = lambda body: refusal(409, "The model differs.")
    assert sentence("restore", server.url, path) == "The model differs."
    assert list(root.iterdir()) == []

    server.work[RESTORES] = lambda body: refusal(504, "It is not over after 60 s.")
    told = sentence("restore", server.url, path)
    name = server.posted[-1][1]["name"]
    assert "not over after 60 s" in told
    assert told.endswith(f"The snapshot stays in the server's folder as {name}.")
    with open_snapshot(find_snapshot(root, name)) as snapshot:
        snapshot.verify()


def test_a_path_that_is_no_snapshot_is_not_brought_in(
    server: RouteServer, root: Path, tmp_path: Path
) -> None:
    make_snapshot(tmp_path / "mine", "s")
    manifest = tmp_path / "mine" / "s" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"org/model", b"org/modem"))
    (tmp_path / "text.zip").write_text("no zip")
    for path in (manifest.parent, tmp_path / "text.zip", tmp_path / "nowhere.zip", tmp_path):
        assert sentence("restore", server.url, path)
    assert server.posted == []
    assert list(root.iterdir()) == []


def test_a_job_is_forked_into_several(server: RouteServer) -> None:
    result = invoke("fork", server.url, "--job", "j", "--as", "a", "--as", "b c")
    body = {"job": "j", "as": ["a", "b c"], "exact": False, "timeout_s": 60.0}
    assert server.posted == [(FORKS, body)]
    assert [line.split(None, 1)[1].strip() for line in result.stdout.splitlines()[1:3]] == [
        "a",
        "b c",
    ]
    assert rows(result)["extra pages"] == "2"
    result = invoke("fork", server.url, "--job", "j", "--as", "a", "--json")
    assert json.loads(result.stdout) == FORKED
    invoke("fork", server.url, "--job", "j", code=2)


def test_the_routes_know_what_the_commands_send(
    server: RouteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = WorkingCore(["j"])
    _, ask = serve(monkeypatch, core)
    server.work = {
        path: lambda body, path=path: Answer(ask(path, "POST", json=body).text)  # type: ignore[misc]
        for path in (SNAPSHOTS, RESTORES, FORKS)
    }
    for result, command in (
        (MADE, ["snapshot", server.url, "--job", "j", "--out", "n", "--stop", "--wait-turn"]),
        (RESTORED, ["restore", server.url, "n", "--timeout", 0.5]),
        (RESTORED, ["restore", server.url, "n", "--job", "k", "--exact"]),
        (FORKED, ["fork", server.url, "--job", "j", "--as", "k", "--as", "l"]),
    ):
        core.result = {name: value for name, value in result.items() if name != "engine"}
        told = json.loads(invoke(*command, "--json").stdout)
        assert told == {**result, "engine": 0}
        invoke(*command)


def test_each_refusal_is_one_sentence(server: RouteServer) -> None:
    commands = (
        (SNAPSHOTS, ["snapshot", server.url, "--job", "j", "--out", "n"]),
        (RESTORES, ["restore", server.url, "n"]),
        (FORKS, ["fork", server.url, "--job", "j", "--as", "k"]),
    )
    vllms_404 = json.dumps({"error": {"message": "Not Found", "type": "Not Found", "code": 404}})
    for path, command in commands:
        for answer, told in (
            (refusal(404, "There is no job of this id."), "There is no job of this id."),
            (refusal(409, f"{HOSTILE}{'w' * 3000}"), rf"\x1b[2J[bold]j[/]\x0a\u202e{'w' * 3000}"),
            (refusal(501, "Set a folder."), "Set a folder."),
            (refusal(401, "A token is needed."), NO_TOKEN),
            (Answer(vllms_404, 404), NO_ROUTES),
            (Answer("", 404), NO_ROUTES),
            (
                Answer("<html>", 502),
                "The server answered with status 502: see its log, and try again.",
            ),
        ):
            server.work[path] = lambda body, answer=answer: answer  # type: ignore[misc]
            assert sentence(*command) == told
            assert sentence(*command, "--json") == told
        for body in ("<html>", "[]", "{}", "[" * 100_000, '{"tokens": "many"}'):
            server.work[path] = lambda body, text=body: Answer(text)  # type: ignore[misc]
            assert "use the same version of tiered-kv" in sentence(*command)
    assert "http://HOST:8000" in sentence("restore", "file:///etc/passwd", "n")
    assert "control character" in sentence("restore", server.url, "n", "--token", "a\nb")


def test_a_missing_server_is_reported() -> None:
    with RouteServer({}).running() as server:
        pass
    told = sentence("fork", server.url, "--job", "j", "--as", "k")
    assert "check that the server runs" in told


def test_the_token_is_sent(server: RouteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["fork", server.url, "--job", "j", "--as", "k"]
    invoke(*command)
    monkeypatch.setenv(ADMIN_TOKEN, "of the environment")
    invoke(*command)
    invoke(*command, "--token", "given")
    assert server.tokens == [None, "Bearer of the environment", "Bearer given"]


def test_a_salt_that_is_not_printable_is_not_shown(server: RouteServer) -> None:
    server.work[FORKS] = lambda body: said({**FORKED, "cache_salt": "a\x1b[2Jb"})
    assert "cache_salt contains invalid characters" in sentence(
        "fork", server.url, "--job", "j", "--as", "k"
    )
