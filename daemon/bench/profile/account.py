"""From the times of one pass to its account: what every operator took, and what lies between them. It sums up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer.daemon.bench.profile.costs import Cost
from deepinfer.daemon.bench.profile.labels import Call, Mark
from deepinfer.daemon.bench.profile.replay import Replay

HAND_OVER = "from task to task"
PROGRAMS = "starting programs"
PYTHON = "batch, outcomes, Python"
BETWEEN = (HAND_OVER, PROGRAMS, PYTHON)
UNNAMED = "unnamed"


@dataclass
class Operator:
    """All calls of one operator in a pass. Times in nanoseconds."""

    calls: int = 0
    tasks: int = 0
    time: float = 0.0
    busy: float = 0.0
    """Of `time`, how long a thread worked, on average."""
    bytes: int = 0
    flops: int = 0

    def add(self, time: float, busy: float, cost: Cost, tasks: int = 1) -> None:
        self.calls += 1
        self.tasks += tasks
        self.time += time
        self.busy += busy
        self.bytes += cost.bytes
        self.flops += cost.flops


@dataclass
class Account:
    whole: float
    operators: dict[str, Operator] = field(default_factory=dict)
    between: dict[str, float] = field(default_factory=dict)

    def operator(self, name: str) -> Operator:
        return self.operators.setdefault(name, Operator())

    @property
    def named(self) -> float:
        return sum(operator.time for operator in self.operators.values())


def account_of(
    whole: float, calls: Sequence[Call], replay: Replay | None = None, marks: Sequence[Mark] = ()
) -> Account:
    """Of one pass: `calls` were made by themselves, `marks` name the items of `replay`."""
    account = Account(whole)
    if replay is not None:
        _add_replay(account, replay, marks)
    for call in calls:
        account.operator(call.operator).add(call.end - call.begin, call.end - call.begin, call.cost)
    account.between[PYTHON] = whole - account.named - sum(account.between.values())
    return account


def _add_replay(account: Account, replay: Replay, marks: Sequence[Mark]) -> None:
    named: set[int] = set()
    for mark in marks:
        items = replay.items[mark.first : mark.end]
        named.update(range(mark.first, mark.end))
        time, busy = sum(item.end - item.begin for item in items), sum(item.busy for item in items)
        account.operator(mark.operator).add(time, busy, mark.cost(replay.batch), len(items))
    for index, item in enumerate(replay.items):
        if index not in named:
            account.operator(UNNAMED).add(item.end - item.begin, item.busy, Cost(0, 0))
    pairs = zip(replay.items, replay.items[1:], strict=False)
    hand_over = sum(b.begin - a.end for a, b in pairs if a.program == b.program != -1)
    account.between[HAND_OVER] = hand_over
    account.between[PROGRAMS] = replay.end - replay.begin - account.named - hand_over


def mean(accounts: Sequence[Account]) -> Account:
    """Of the quieter half: means add up where medians do not, and a slow minute of the machine is left out."""
    quiet = sorted(accounts, key=lambda account: account.whole)[: -(-len(accounts) // 2)]
    count = len(quiet)
    found = Account(sum(account.whole for account in quiet) / count)
    for name, first in quiet[0].operators.items():
        same = [account.operators[name] for account in quiet]
        time, busy = sum(each.time for each in same) / count, sum(each.busy for each in same) / count
        found.operators[name] = Operator(first.calls, first.tasks, time, busy, first.bytes, first.flops)
    found.between = {name: sum(account.between[name] for account in quiet) / count for name in quiet[0].between}
    return found
