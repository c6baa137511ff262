"""The types of the JSON report. ``docs/report.md`` documents every key; fields are named like their keys.

``SCHEMA`` grows by one whenever a key is removed or changes its meaning; new keys may appear at any time. Only the
process that reads and judges uses these types: the watched script sends plain dicts and never imports this module.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from ...core.types import JsonObject
from .prices import Money

SCHEMA = 2


class Spread(Struct):
    """Summary of a histogram of durations. A duration is *slow* if it exceeds three times the median."""

    count: int = 0
    median_s: float = 0.0
    p95_s: float = 0.0
    slow_share: float = 0.0
    slow_count: int = 0


class TaskSpread(Spread):
    """``slow_samples``: by sample index, how often the stack sampler saw the sample being loaded in a slow task."""

    slow_samples: dict[str, int] = {}


class Stage(Struct, frozen=True, omit_defaults=True):
    """``self_s`` is wall time, ``cpu_s`` CPU time, ``wait_s`` the loop's waiting. Each stage has only some of these."""

    self_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    tasks: int = 0


class Stages(Struct, frozen=True):
    """Seconds inside tasks, summed over workers, and of the consumer. If ``worker.tasks`` is 0, no task was seen."""

    fetch: Stage = Stage()
    collate: Stage = Stage()
    transport: Stage = Stage()
    worker: Stage = Stage()
    consumer: Stage = Stage()
    startup: Stage = Stage()

    @property
    def made_s(self) -> float:
        """All wall time inside tasks."""
        return self.fetch.self_s + self.collate.self_s + self.transport.self_s


class Memory(Struct):
    worker_pss: list[int] = []
    batch_bytes: int = 0
    own: list[list[list[float]]] = []


class CodeLine(Struct):
    """A line of code in tasks. ``ran`` and ``waited`` are shares of a task's time."""

    kind: str
    name: str
    line: str
    ran: float
    waited: float


class Kernel(Struct):
    """The kernel's counters of the workers, summed over ``seconds`` of their lives; 0 if no worker was seen."""

    delay_ns: int = 0
    stored: int = 0
    system_ns: int = 0
    cpu_ns: int = 0
    seconds: float = 0.0


class Crossing(Struct):
    """Calls at one line of code that copy between host and device, or that wait for the device."""

    kind: str
    line: str
    calls: int
    seconds: float
    bytes: int


class Device(Struct):
    """What was seen of the device. ``crossings`` were timed in ``steps`` steps, which took ``seconds`` together."""

    gaps: int = 0
    starved_share_of_wait: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    crossings: list[Crossing] = []
    pinned_bytes: int = 0


class EpochRow(Struct, array_like=True):
    """One of ``by_epoch``: a list in the JSON."""

    batches: float = 0.0
    wait_s: float = 0.0
    step_s: float = 0.0
    first_wait_s: float = 0.0
    loop_s: float = 0.0
    samples: float = 0.0
    first_step_s: float = 0.0

    @property
    def warm_up_s(self) -> float:
        """How much longer the first step was than the others' mean: it also loads and selects kernels."""
        others = self.batches - 2  # without the first step, and not counting one after the last batch
        return max(0.0, self.first_step_s - (self.step_s - self.first_step_s) / others) if others > 0 else 0.0

    @property
    def later_wait_s(self) -> float:
        """Waiting after the first batch."""
        return self.wait_s - self.first_wait_s


class EpochTimes(Struct):
    """Wall-clock seconds of whole epochs. ``later`` is the median of those after the first."""

    count: int = 0
    first: float | None = None
    later: float | None = None
    each: list[float] = []


class Cache(Struct):
    """What ``--apply`` caches for a loader. ``calls``: ``filled`` counts results of calls, and a sample may make more
    than one. ``stale``: the cache was discarded because a sample that was made again differed. ``collate``: calls of
    the collate function whose results are kept. ``compared``: samples from the cache that were made again and were the
    same. ``from_earlier_runs``: samples that ``--keep`` found on disk;
    ``why_not_kept``: why it leaves none for later ones."""

    kept: str = ""
    cut: str = ""
    why_not: str = ""
    filled: int = 0
    samples: int = 0
    calls: bool = False
    nbytes: int = 0
    shared: int = 1
    fill_s: float = 0.0
    compared: int = 0
    discarded: str = ""
    stale: bool = False
    collate: str = ""
    from_earlier_runs: int = 0
    why_not_kept: str = ""


class LoaderSettings(Struct):
    """A loader's settings, by torch's names. A field is ``object`` if a user's class may hold a value of any type.
    ``divides``: an iterable dataset's code asks which worker it runs in. ``draws``: making batches in the script's
    process advanced one of its random generators."""

    class_: str = field(default="", name="class")
    dataset: str = ""
    batch_size: object = None
    num_workers: int = 0
    auto: bool = False
    prefetch_factor: object = None
    persistent_workers: bool = False
    pin_memory: bool = False
    in_order: object = True
    worker_method: object = "process"
    multiprocessing_context: object = None
    iterable: bool = False
    no_workers: str = ""  # why worker processes cannot be started for this loader; "" if they can
    divides: bool = False
    draws: bool = False
    engine: str = ""
    threads: int = 1
    processes: int = 1
    applied: bool = False


class FailedSample(Struct):
    index: object
    file: str | None = None
    error: str = ""
    kind: str = ""


class Faults(Struct, omit_defaults=True):
    """What failed and was replaced or skipped; an empty object if nothing failed."""

    samples: int = 0
    first: list[FailedSample] = []
    quarantine: str = ""
    deaths: int = 0
    died: list[str] = []
    timeouts: int = 0


class LoaderReport(Struct):
    """One of ``loaders``: all loaders that one line of code created, over all processes."""

    name: str
    batches: int = 0
    samples: int = 0
    epochs: int = 0
    ended: int = 0
    made: int = 1
    at_once: int = 1
    wait_s: float = 0.0
    step_s: float = 0.0
    between_s: float = 0.0
    loop_s: float = 0.0
    samples_per_s: float = 0.0
    settings: LoaderSettings = field(default_factory=LoaderSettings)
    stages: Stages = Stages()
    memory: Memory = field(default_factory=Memory)
    decisions: list[str] = []
    steps: Spread = field(default_factory=Spread)
    waits: Spread = field(default_factory=Spread)
    tasks: TaskSpread = field(default_factory=TaskSpread)
    by_epoch: list[EpochRow] = []
    filled_epochs: int = 0
    epoch_s: EpochTimes = field(default_factory=EpochTimes)
    over_time: list[list[float]] = []
    device: Device = field(default_factory=Device)
    faults: Faults = field(default_factory=Faults)
    where: list[CodeLine] = []
    looks: int = 0
    kernel: Kernel = field(default_factory=Kernel)
    cache: Cache = field(default_factory=Cache)

    @property
    def busy_s(self) -> float:
        """Seconds of waiting and stepping."""
        return self.wait_s + self.step_s


class Around(Struct):
    """What the machine did during the run."""

    memory_stalled_max: float = 0.0
    swapped: int = 0
    memory_available_min: int | None = None
    shm_free_min: int | None = None
    gpu_busy: list[float] = []


class Finding(Struct):
    """A cause with its evidence. ``share`` is the share of the loop's time that it costs, ``fix`` one line of advice,
    and ``diff`` the change of settings in the user's own file."""

    cause: str
    share: float = 0.0
    evidence: JsonObject = {}
    fix: str = ""
    predicted_speedup: float | None = None
    change: JsonObject = {}
    loader: str = ""
    applied: bool = False
    measured_speedup: float | None = None
    diff: str = ""


class Bypassing(Struct):
    """A loader that stoker's engine does not reach. ``seen``: its batches were counted."""

    name: str
    class_: str = field(default="", name="class")
    reason: str = ""
    seen: bool = True


class RankWait(Struct):
    rank: int
    batches: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0


class Unequal(Struct):
    """A loader whose number of batches differs between ranks. ``batches``: pairs of rank and batches in an epoch."""

    loader: str
    batches: list[tuple[int, int]]


class Ranks(Struct):
    """Ranks of a distributed run. ``starving`` is the rank that makes the others wait."""

    each: list[RankWait]
    starving: int | None = None
    unequal: list[Unequal] = []


class ChangedSettings(Struct, omit_defaults=True):
    """Settings that ``--apply`` may change; None for one that it leaves alone."""

    num_workers: int | None = None
    staged: bool | None = None


class AppliedSettings(Struct):
    """What ``--apply`` changed in one loader, and why."""

    before: ChangedSettings = field(name="from", default_factory=ChangedSettings)
    after: ChangedSettings = field(name="to", default_factory=ChangedSettings)
    reason: str = ""
    measured_s: float = 0.0
    cache: Cache = field(default_factory=Cache)


class Change(Struct):
    """A figure before and after ``--apply``; None if unknown."""

    before: float | None = None
    after: float | None = None

    def times_as_fast(self, rate: bool = False) -> float | None:
        """Returns the speed-up; None if a figure is unknown or 0. ``rate``: the figures are rates, not durations."""
        if not self.before or not self.after:
            return None
        return self.after / self.before if rate else self.before / self.after


class EachEpoch(Struct):
    """Seconds of every whole epoch, before and after ``--apply``."""

    before: list[float] = []
    after: list[float] = []


class LoaderChange(Struct):
    """One loader before and after ``--apply``: seconds of its epochs, and its rate."""

    name: str
    first: Change = field(default_factory=Change)
    later: Change = field(default_factory=Change)
    samples_per_s: Change = field(default_factory=Change)
    each: EachEpoch = field(default_factory=EachEpoch)


class Cost(Struct):
    """Seconds that stoker spent: before first batches, and in workers to store samples."""

    trials_s: float = 0.0
    fill_s: float = 0.0


class Compared(Struct):
    """The run before and after ``--apply``; ``script`` is the wall clock of all of it."""

    estimated: bool
    script: Change
    loaders: list[LoaderChange]
    notes: list[str] = []
    cost: Cost = field(default_factory=Cost)


class RememberedRun(Struct):
    """An observed run as ``history`` remembers it, with only what the comparison shows of loaders and findings.
    ``script`` is a digest of the script. ``complete``: the run ended successfully, so its total can be compared."""

    version: int
    script: str
    complete: bool
    wall_s: float
    verdict: str
    loaders: list[LoaderReport]
    findings: list[Finding]


class Applied(Struct):
    """What ``--apply`` did, by loader, compared with an observed run of the same command if one is remembered."""

    settings: dict[str, AppliedSettings]
    compared: Compared
    before: RememberedRun | None = None
    speedup: dict[str, float] = {}


class RunReport(Struct):
    """What ``stoker run`` writes. ``headline``: one sentence on what came of the run."""

    command: list[str]
    exit_code: int
    wall_s: float
    loaders: list[LoaderReport]
    verdict: str
    findings: list[Finding] = []
    machine: JsonObject = {}  # what ``stoker check --json`` prints
    around: Around = field(default_factory=Around)
    applied: Applied | None = None
    ranks: Ranks | None = None
    bypassing: list[Bypassing] = []
    partial: bool = False
    diff: str = ""
    money: Money | None = None
    headline: str = ""
    schema: int = SCHEMA

    def as_dict(self) -> JsonObject:
        """Returns the report as dicts, lists and scalars, for JSON."""
        found: JsonObject = msgspec.to_builtins(self, str_keys=True, enc_hook=str)
        return found
