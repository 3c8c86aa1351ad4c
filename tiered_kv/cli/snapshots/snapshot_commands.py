"""``tiered-kv snapshot``, ``restore``, ``fork``, ``inspect`` and ``diff``: save, restore and fork
jobs on a running server, and show the contents of snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tiered_kv.cli.terminal import (
    AsJson,
    Command,
    ServerUrl,
    Token,
    exit_unless,
    print_json,
    print_table,
    refuse,
    report,
    sentence_of,
    take_any_text,
)
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.mismatch import difference
from tiered_kv.snapshot.reader import open_snapshot
from tiered_kv.status import DEFAULT_TIMEOUT_S, MOST_TIMEOUT_S
from tiered_kv.top.route_client import MOST_OF_SENTENCE, RouteClient, RouteError
from tiered_kv.top.safe_text import harmless

from .server_folder import ServerFolder, check_new, is_path, new_name
from .snapshot_report import (
    describe_snapshot,
    difference_rows,
    forked_rows,
    made_rows,
    restored_rows,
    snapshot_rows,
)

Job = Annotated[str, typer.Option(metavar="ID", help="Job id, as in the job's requests.")]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Make the continuation bit-exact."),
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        max=MOST_TIMEOUT_S,
        help="How long to wait for completion. The operation continues on the server after that.",
    ),
]
COLUMNS = {"": False, " ": False}
"""Columns of the tables that show the server's answers."""
Where = Annotated[Path, typer.Argument(metavar="PATH", help="A snapshot: a folder or a zip file.")]


def snapshot_command(
    url: ServerUrl,
    job: Job,
    out: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Snapshot name in the server's folder, or a path (with a slash or .zip).",
        ),
    ],
    wait_turn: Annotated[
        bool, typer.Option("--wait-turn", help="Wait for the current turn to finish.")
    ] = False,
    stop: Annotated[
        bool,
        typer.Option("--stop", help="Stop the current turn after its next token."),
    ] = False,
    exact: Exact = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Create a snapshot of a job, which contains its context and its KV. The server needs
    VLLM_PLUGINS=tiered_kv and TIERED_KV_SNAPSHOT_PATH. To write a snapshot to a path, run the
    command on the server's machine as the server's user.

    Exits with 2 if the snapshot is not created.
    """
    with _server(url, token) as server:
        path = Path(out) if is_path(out) else None
        folder = None
        if path is not None:
            check_new(path)
            folder = ServerFolder(server.snapshot_folder())
        name = out if path is None else new_name()
        said = server.operate(
            "snapshots", timeout, job=job, name=name, wait_turn=wait_turn, stop=stop, exact=exact
        )
        if path is not None and folder is not None:
            try:
                folder.take_out(name, path)
            except (SnapshotError, OSError) as error:
                _stays(sentence_of(error), name)
            said = {**said, "name": None, "path": str(path)}
        report(as_json, said, COLUMNS, made_rows(said, str(path or name)))


def restore_command(
    url: ServerUrl,
    snapshot: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Snapshot name in the server's folder, or a path (with a slash or .zip).",
        ),
    ],
    job: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Id of the restored job. Defaults to the job's id in the snapshot."
        ),
    ] = None,
    exact: Exact = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Restore a job from a snapshot, so that the job's next turn finds its KV. To restore from a
    path, run the command on the server's machine as the server's user.

    Exits with 2 if the job is not restored.
    """
    with _server(url, token) as server:
        if is_path(snapshot):
            folder = ServerFolder(server.snapshot_folder())
            name = folder.bring_in(Path(snapshot))
            try:
                said = server.operate("restores", timeout, name=name, job=job, exact=exact)
            except RouteError as error:
                if not error.is_final:
                    _stays(str(error), name)
                folder.remove(name)
                raise
            except KeyboardInterrupt:
                _stays("interrupted; the restore continues on the server", name)
            folder.remove(name)
        else:
            said = server.operate("restores", timeout, name=snapshot, job=job, exact=exact)
        report(as_json, said, COLUMNS, restored_rows(said))


def fork_command(
    url: ServerUrl,
    job: Job,
    into: Annotated[
        list[str],
        typer.Option("--as", metavar="ID", help="Id of a new job. Repeat to create several jobs."),
    ],
    exact: Exact = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Fork a job. The new jobs start with the job's context and share its KV.

    Exits with 2 if the job is not forked.
    """
    with _server(url, token) as server:
        said = server.operate("forks", timeout, job=job, exact=exact, **{"as": into})
        report(as_json, said, COLUMNS, forked_rows(said))


def inspect_command(
    path: Where,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also print the token ids of the context.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read and check every page. Exits with 1 if a page is bad."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a snapshot. Works offline.

    Exits with 2 if PATH is not a snapshot.
    """
    bad = None
    with _told(), open_snapshot(path) as snapshot:
        if verify:
            try:
                snapshot.verify()
            except SnapshotError as error:
                bad = str(error)
        manifest, nbytes = snapshot.manifest, snapshot.nbytes
    if as_json:
        said = {"path": str(path), "nbytes": nbytes, **describe_snapshot(manifest)}
        if tokens:
            said["token_ids"] = list(manifest.token_ids)
        print_json({**said, "good": bad is None, "bad": bad} if verify else said)
    else:
        rows = snapshot_rows(manifest, nbytes)
        if verify:
            rows.append(["verified", "all pages good" if bad is None else "bad"])
        print_table({"": False, _shown(path): False}, rows)
        if tokens:
            typer.echo(" ".join(map(str, manifest.token_ids)))
        if bad is not None:
            typer.echo(f"bad: {harmless(bad, MOST_OF_SENTENCE)}", err=True)
    exit_unless(bad is None)


def diff_command(
    first: Annotated[Path, typer.Argument(metavar="A", help="First snapshot.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Second snapshot.")],
    as_json: AsJson = False,
) -> None:
    """Compare two snapshots: common tokens and pages, and fields that differ. Works offline.

    Exits with 2 if A or B is not a snapshot.
    """
    with _told():
        with open_snapshot(first) as one, open_snapshot(second) as other:
            manifests = one.manifest, other.manifest
        found = difference(*manifests)
    result = {"a": str(first), "b": str(second), **asdict(found)}
    columns = {"": False, _shown(first): False, _shown(second): False}
    report(as_json, result, columns, difference_rows(found))


def add_to(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for name, summary, command in (
        ("snapshot", "Create a snapshot of a job of a running server.", snapshot_command),
        ("restore", "Restore a job from a snapshot on a running server.", restore_command),
        ("fork", "Fork a job of a running server.", fork_command),
        ("inspect", "Show the contents of a snapshot.", inspect_command),
        ("diff", "Compare two snapshots.", diff_command),
    ):
        app.command(name, cls=Command, short_help=summary)(command)


@contextmanager
def _told() -> Iterator[None]:
    """Convert errors of the block to one sanitized sentence and exit code 2."""
    take_any_text()
    try:
        yield
    except (SnapshotError, RouteError, OSError) as error:
        refuse(harmless(sentence_of(error), MOST_OF_SENTENCE))


@contextmanager
def _server(url: str, token: str | None) -> Iterator[RouteClient]:
    with _told():
        yield RouteClient(url, token)


def _stays(why: str, name: str) -> NoReturn:
    said = f"{why.removesuffix('.')}. The snapshot stays in the server's folder as {name}."
    refuse(harmless(said, MOST_OF_SENTENCE))


def _shown(path: Path) -> str:
    return harmless(str(path))
