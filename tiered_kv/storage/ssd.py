"""The SSD tier: segment stores on a local disk, with the codec that suits the disk."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from tiered_kv.codecs.registry import from_table
from tiered_kv.config import TierConfig
from tiered_kv.errors import ConfigError
from tiered_kv.plain_files import check_owner
from tiered_kv.storage.disk.files import RealFiles
from tiered_kv.storage.disk.probe import DiskSpeed, measure_disk
from tiered_kv.storage.store.locks import StoreError
from tiered_kv.storage.store.options import StoreOptions, io_threads
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.tiers import SSD, Knowledge, TierSpec

from .base import PageStore, StoreSite
from .codec_choice import choose_codec

logger = logging.getLogger(__name__)

ASSUMED_SPEED = DiskSpeed(read=1e9, write=1e9)


class SsdTier:
    """The SSD tier under ``config.ssd_path``."""

    def __init__(self, config: TierConfig) -> None:
        self.spec = TierSpec(SSD, Knowledge.KNOWN, config.ssd_bytes)
        self.bandwidth = 0.0
        self._config = config
        self._disk: DiskSpeed | None = None

    def open(self, site: StoreSite) -> PageStore:
        """Open the rank's store. The first call measures the disk and chooses the codec."""
        config = self._config
        assert config.ssd_path is not None
        threads = config.io_threads or io_threads(site.cores)
        options = StoreOptions(
            root=config.ssd_path,
            fingerprint=site.fingerprint,
            replica=site.replica,
            rank=site.rank,
            ranks=site.ranks,
            page_format=site.page_format,
            capacity_bytes=config.ssd_bytes,
            io_threads=threads,
        )
        try:
            if self._disk is None:
                RealFiles().make_folders(config.ssd_path)
                check_owner(config.ssd_path)
                self._disk = _measure(config.ssd_path, threads)
            codec, self.bandwidth = choose_codec(
                config.codec, site.page_format, self._disk, min(site.cores, threads)
            )
            return SegmentStore(options, codec, partial(from_table, trusted=config.codec))
        except StoreError as error:
            raise ConfigError(f"TIERED_KV_SSD_PATH={config.ssd_path}: {error}") from error
        except OSError as error:
            raise ConfigError(
                f"TIERED_KV_SSD_PATH={config.ssd_path} cannot be used ({error.strerror}): "
                "make the server's user its owner, with write access, or set another folder"
            ) from error


def _measure(folder: Path, threads: int) -> DiskSpeed:
    try:
        return measure_disk(folder, threads)
    except OSError as error:  # a full disk can still be read
        logger.warning(
            "the speed of the disk under %s cannot be measured (%s), so a default speed is assumed",
            folder,
            error,
        )
        return ASSUMED_SPEED
