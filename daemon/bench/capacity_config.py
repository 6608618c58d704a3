"""What `deepinfer-daemon bench capacity` measures: KV formats, their memory, and the requests that fill it."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.daemon.bench.own_daemon import FORMATS, OwnDaemon
from deepinfer.daemon.setting import setting


@dataclass(frozen=True, kw_only=True)
class CapacityBench(OwnDaemon):
    kv_cache_dtype: str = setting(FORMATS, "KV formats, separated by commas; ratios are to the first.")
    pool_mb: int = setting(64, "MiB of the KV pool of every format. 0: whatever `start` takes.", low=0)
    requests: int = setting(4, "Requests that fill the pool, at least; more where contexts are shorter.", low=1)
