"""Sends a load: every job when its time has come, and never more than so many at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from deepinfer.clients import Client
from deepinfer.daemon.bench.load import SILENCE_SECONDS, Streams
from deepinfer.daemon.bench.served import Pass
from deepinfer.daemon.bench.workload import Job


def drive(client: Client, jobs: Sequence[Job], starts: Sequence[float], concurrency: int, **fields: Any) -> Pass:
    """`starts`: ascending seconds from now. A job whose time has come waits until fewer than `concurrency` are live;
    that wait is in no latency. `fields` go into every request."""
    sent = 0
    with Streams(client, keep_errors=True) as streams:
        began = time.perf_counter()
        while sent < len(jobs) or streams.live:
            elapsed = time.perf_counter() - began
            while sent < len(jobs) and streams.live < concurrency and starts[sent] <= elapsed:
                job = jobs[sent]
                streams.send(job.prompt, job.new_tokens, **job.fields, **fields)
                sent += 1
            waits_for_time = sent < len(jobs) and streams.live < concurrency
            streams.wait(starts[sent] - elapsed if waits_for_time else SILENCE_SECONDS)
        return Pass(streams.seen, time.perf_counter() - began)
