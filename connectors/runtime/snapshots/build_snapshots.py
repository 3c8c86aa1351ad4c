"""The part that takes jobs out of an engine and brings them back, built of the other components."""

from __future__ import annotations

from tiered_kv.connectors.runtime.build import EngineState, GapGroup, Pages
from tiered_kv.connectors.runtime.dependencies import Dependencies

from .capture import Captures
from .context_pages import ContextNames
from .file_thread import SnapshotFiles
from .job_capture import JobCaptures
from .no_snapshots import NoSnapshots
from .snapshots import Snapshots


def build_snapshots(
    given: Dependencies, engine: EngineState, pages: Pages, gaps: GapGroup
) -> Snapshots | NoSnapshots:
    """Build it. Nothing is taken without a folder, or from an engine that is only observed."""
    root = given.config.snapshot_path
    if root is None or given.config.observes:
        return NoSnapshots(observes=given.config.observes)
    facts, fingerprints = given.facts, given.fingerprints
    names = ContextNames(facts, pages.names, given.make_request)
    files = SnapshotFiles(root, facts, fingerprints, names)
    captures = Captures(
        facts,
        engine.pool,
        pages.book,
        pages.saves,
        pages.finder,
        pages.promotions,
        pages.sources,
        fingerprints.group_of,
        names,
        files.thread,
        given.clock,
    )
    return Snapshots(
        facts,
        pages.index,
        pages.tails,
        gaps.manager,
        JobCaptures(captures, engine.turns),
        files,
        pages.snapshots,
        engine.counters,
        given.clock,
        given.wall,
    )
