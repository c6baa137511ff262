"""Small parts on their own: codec, records, seeds, model, report, terminal."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.core import output, terminal
from stoker.core.errors import StokerError, TransportError, UsageError, WorkerDiedError, WorkerTimeoutError
from stoker.core.options import AutoWorkers, Budget, Knobs
from stoker.core.random_state import preserved
from stoker.diagnosis.doctor.loader_stats import LoaderStats
from stoker.diagnosis.doctor.verdict import diagnose
from stoker.diagnosis.report import schema, text
from stoker.diagnosis.report.merge import merged, snapshots
from stoker.diagnosis.report.schema import LoaderReport
from stoker.sampling import seeding
from stoker.transport.codec import Encoded, decode
from stoker.transport.messages import INLINE, Kind, Message, Outbox, Reader, pack, send
from tests.contract.trace import canon
from tests.helpers import pretend_device

DTYPES = [
    torch.float32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.bfloat16,
    torch.complex64,
    torch.float16,
    torch.int16,
]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    t = torch.arange(int(np.prod(shape, dtype=int)) if shape else 1).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.integers(0, 4)):
            case 0 if t.dim() > 1:
                t = t.transpose(0, -1)
            case 1 if t.dim() and t.shape[0]:
                t = t[:: draw(st.integers(1, 3))]
            case 2 if t.dim():
                t = t.unsqueeze(0).expand(3, *t.shape)
            case 3 if t.dim() and t.shape[0] > 1:
                t = t[1:]
            case 4:
                t = t.clone()
    return t


arrays = st.tuples(st.sampled_from(["f4", "i8", "u1", "S3", "c8", "M8[s]"]), st.integers(1, 300)).map(
    lambda a: np.arange(a[1]).astype(a[0]) if a[0] != "M8[s]" else np.arange(a[1]).view(a[0])
)
leaves = st.one_of(
    tensors(),
    arrays,
    st.integers(),
    st.text(max_size=5),
    st.binary(max_size=5000),
    st.none(),
    st.floats(allow_nan=False),
)
trees = st.recursive(
    leaves,
    lambda t: st.one_of(st.lists(t, max_size=4), st.tuples(t, t), st.dictionaries(st.text(max_size=3), t, max_size=3)),
)


def there_and_back(obj: Any) -> Any:
    e = Encoded(obj).place()
    blob = e.blob()
    return decode(blob[: len(e.meta)], bytearray(blob[len(e.meta) :]))


@settings(max_examples=40)
@given(trees)
def test_any_object_comes_back(obj: Any) -> None:
    assert canon(there_and_back(obj)) == canon(obj)


@settings(max_examples=30)
@given(tensors(), st.integers(0, 3))
def test_what_overlaps_goes_on_overlapping(t: torch.Tensor, i: int) -> None:
    if t.dim() == 0 or t.shape[0] <= i or t[i].numel() == 0 or 0 in t.stride():
        return
    whole, part = there_and_back((t, t[i]))
    part.fill_(1)
    assert torch.equal(whole[i], part)


def test_special_tensors() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(there_and_back(sparse).to_dense(), sparse.to_dense())
    parameter = torch.nn.Parameter(torch.ones(2))
    assert isinstance(there_and_back(parameter), torch.nn.Parameter)
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 3, torch.quint8)
    assert torch.equal(there_and_back(quantized).dequantize(), quantized.dequantize())
    conj = torch.tensor([1 + 2j]).conj()
    assert torch.equal(there_and_back(conj), conj)
    assert there_and_back(torch.ones(2, requires_grad=True)).requires_grad
    with pytest.raises(RuntimeError, match="non-leaf"):
        Encoded(torch.ones(2, requires_grad=True) * 2)


def test_an_array_that_was_read_only_is_writable() -> None:
    a = np.arange(1000)
    a.flags.writeable = False
    there_and_back([a])[0][0] = 5


@pytest.mark.parametrize("dtype", ["<i8", ">i8"])
@pytest.mark.parametrize("writeable", [True, False])
def test_an_array_lies_as_pickle_lays_it(dtype: str, writeable: bool) -> None:
    whole = np.arange(2000, dtype=dtype).reshape(10, 20, 10)
    arrays = [whole, whole.T, whole.transpose(1, 0, 2), whole[:, ::2], whole[::-1]]
    for a in [*arrays, np.broadcast_to(whole[0, 0], (99, 10))]:
        if not writeable:
            a = a.view()
            a.flags.writeable = False
        (got,), (wanted,) = there_and_back([a]), pickle.loads(ForkingPickler.dumps([a]))
        assert got.dtype == wanted.dtype
        assert (got.strides, got.tolist()) == (wanted.strides, wanted.tolist())


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3 * INLINE), max_size=20))
@example([5000] * 100)  # more than one read takes, so a record is cut in two
def test_records_of_any_length_arrive_whole(sizes: list[int]) -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    box, reader = Outbox(write), Reader(read)
    sent = [Message(Kind.TASK, 1, i, i, payload=bytes([i % 251]) * n) for i, n in enumerate(sizes)]
    for r in sent:
        box.put(r.kind, r.worker, r.epoch, r.task, payload=r.payload)
    while not box.flush() or len(reader.ready) < len(sent):
        reader.feed()
    assert list(reader.ready) == sent
    os.close(read)
    os.close(write)


def test_the_end_of_a_pipe_and_rubbish() -> None:
    read, write = os.pipe()
    send(write, pack(Kind.END, 0, 0, 7))
    reader = Reader(read)
    assert reader.feed()
    assert reader.ready.popleft().task == 7
    os.write(write, b"\xff" * 200)
    with pytest.raises(TransportError):
        reader.feed()
    os.close(write)
    os.close(read)


@given(st.integers(0, 2**64), st.integers(0, 1000), st.integers(0, 10**9))
def test_task_seeds_are_64_bits_and_differ(base: int, epoch: int, task: int) -> None:
    seed = seeding.task_seed(base, epoch, task)
    assert 0 <= seed < 1 << 64
    assert seed not in (seeding.task_seed(base, epoch, task + 1), seeding.task_seed(base, epoch + 1, task))


def test_a_worker_is_seeded_as_torch_seeds_it() -> None:
    from torch.utils.data._utils.worker import _generate_state

    with preserved():
        assert seeding.seed_worker(123, 2) == 125
        drawn = torch.rand(2), np.random.rand(2)
        torch.manual_seed(125)
        np.random.seed(_generate_state(123, 2))
        assert torch.equal(drawn[0], torch.rand(2))
        assert (drawn[1] == np.random.rand(2)).all()


@pytest.mark.slow
@given(st.integers(0, 2**64), st.integers(0, 1000), st.integers(0, 10**9))
def test_no_generator_of_a_task_draws_what_another_does(base: int, epoch: int, task: int) -> None:
    """Two of the three are the same algorithm: seeded from the same words, a flip would be tied to a crop."""
    own = seeding.Generators(0, 0)
    own.seed_task(base, epoch, task)
    with preserved():
        seeding.seed_task(base, epoch, task)
        python, torchs, numpy = random.random(), float(torch.rand((), dtype=torch.float64)), float(np.random.rand())
        words = {random.getrandbits(32), int(torch.randint(1 << 32, ())), int(np.random.randint(1 << 32, dtype="u4"))}
    assert len({python, torchs, numpy}) == len(words) == 3
    assert len({own.python.random(), float(own.numpy.random()), float(torch.rand((), generator=own.torch))}) == 3


def test_random_state_is_preserved() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with preserved():
        torch.rand(5)
    assert torch.equal(before, torch.get_rng_state())


def test_options_check_themselves() -> None:
    assert Knobs(3, 2).window == 6
    for bad in ({"num_workers": 0}, {"num_workers": 1, "prefetch_factor": 0}):
        with pytest.raises(UsageError):
            Knobs(**bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        Budget(-1)
    assert type(AutoWorkers(2) + 1) is int
    for e in (UsageError("x"), TransportError("x"), WorkerDiedError("x", [1]), WorkerTimeoutError("x")):
        assert isinstance(e, StokerError)
    assert isinstance(WorkerDiedError("x"), RuntimeError)


def entry(
    wait: float, step: float, workers: int = 1, service: float = 0.0, cpu: float = 0.0, n: int = 100
) -> LoaderReport:
    stages: dict[str, Any] = {"consumer": {"cpu_s": step * n}}
    if service:
        stages |= {"fetch": {"self_s": service * n}, "worker": {"cpu_s": cpu * n, "tasks": n}}
    found = {
        "name": "a.py:1", "batches": n, "samples": n, "epochs": 1, "wait_s": wait * n, "step_s": step * n,
        "samples_per_s": 1.0, "settings": {"num_workers": workers, "threads": 1}, "stages": stages,
    }  # fmt: skip
    return msgspec.convert(found, LoaderReport)


def test_verdicts() -> None:
    assert diagnose([], 8, False) == ("unknown", [])
    assert diagnose([entry(1, 1, n=2)], 8, False)[0] == "unknown"
    assert diagnose([entry(0.001, 0.1)], 8, False) == ("healthy", [])
    verdict, (f,) = diagnose([entry(0.1, 0.1, workers=0, service=0.1, cpu=0.1)], 8, False)
    assert (verdict, f.cause) == ("input-bound", "main_process_loading")
    assert f.predicted_speedup == pytest.approx(2.0, rel=0.01)
    assert diagnose([entry(0.0002, 0.00001, workers=0, service=0.0002, cpu=0.0002)], 2, False) == ("input-bound", [])
    verdict, (f,) = diagnose([entry(0.3, 0.1, workers=1, service=0.4, cpu=0.1)], 4, False)
    assert (verdict, f.cause) == ("input-bound", "too_few_workers")
    assert f.predicted_speedup == pytest.approx(4.0)
    assert diagnose([entry(0.3, 0.1, workers=4, service=1.6)], 4, False) == ("input-bound", [])
    assert diagnose([entry(0.3, 0.1, workers=1, service=0.05)], 4, False) == ("input-bound", [])


def test_a_prediction_never_promises_less_than_now() -> None:
    assert LoaderStats(entry(0.1, 0.1, 2, service=9.0, cpu=9.0), 1).speedup(1) == 1.0
    assert LoaderStats(entry(0.1, 0.1), 1).speedup(1) is None


def snapshot(pid: int, **kw: Any) -> dict[str, Any]:
    m = {
        "name": "t.py:3", "batches": 10, "samples": 100, "epochs": 1, "ended": 1, "made": 1, "between_s": 0.0, "at_once": 1, "wait_s": 1.0, "first_wait_s": 0.5, "step_s": 1.0, "step_cpu_s": 1.0, "loop_s": 2.0,
        "settings": {"num_workers": 1}, "tasks": 10, "fetch_ns": 10**9, "collate_ns": 0, "transport_ns": 0, "cpu_ns": 10**9,
    }  # fmt: skip
    return {"pid": pid, "threads": 2, "loaders": [{**m, **kw}], "final": True}


def test_processes_are_merged() -> None:
    (one,) = merged(snapshots([snapshot(1), snapshot(2)]))
    assert (one.batches, one.samples_per_s, one.settings.processes) == (20, 100.0, 2)
    assert merged(snapshots([snapshot(1, epochs=0)])) == []


def report(*processes: dict[str, Any]) -> schema.RunReport:
    return schema.RunReport(["t.py"], 0, 3.0, merged(snapshots(processes)), "input-bound")


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    made = report(snapshot(1, name="\udcff.py:3"))  # a file whose name is no text
    output.give(made.as_dict(), path, lambda: None)
    found = json.loads(path.read_text())
    assert found["schema"] == schema.SCHEMA
    assert msgspec.convert(found, schema.RunReport) == made
    assert os.listdir(tmp_path) == ["r.json"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (9.996e-4, "1.0 ms"),
        (0.99996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (299.4, "4 min 59 s"),
        (299.6, "5 min 0 s"),
        (3600.0, "60 min 0 s"),
    ],
)
def test_a_duration_is_rounded_before_it_is_divided(seconds: float, text: str) -> None:
    assert terminal.human_seconds(seconds) == text


@pytest.mark.parametrize("columns", ["40", "60", "120"])
def test_the_text_fits_small_terminals(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = text.render(report(snapshot(1)), Path("r.json"), io.StringIO())
    assert "\033[" not in out
    assert (
        max(len(line) for line in terminal.table(["a", "b"], [["x" * 30, "y" * 30]], int(columns)).splitlines()) <= 62
    )
    assert "input-bound" in out


def test_the_report_says_what_workers_weigh_and_what_was_decided() -> None:
    one, two = snapshot(1), snapshot(2)
    one["loaders"][0] |= {
        "worker_pss": {0: 100 << 20},
        "decisions": ["1 -> 2 workers: the consumer waits 40% of its time"],
    }
    two["loaders"][0] |= {"worker_pss": {0: 120 << 20}}
    made = report(one, two)
    assert made.loaders[0].memory.worker_pss == [100 << 20, 120 << 20]
    out = text.render(made, Path("r.json"), io.StringIO(), details=True)
    assert "workers (PSS): 2 x up to 120 MB, together 220 MB" in out
    assert "1 -> 2 workers: the consumer waits 40% of its time" in out


@pytest.mark.skipif(sys.platform != "linux", reason="devices are looked for in /dev")
def test_a_build_for_cuda_without_a_gpu_queues_no_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which nothing would read, and which cost a new worker 2 ms."""
    pretend_device(monkeypatch)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(seeding, "_CUDA_NODES", ("no-such-device*",))
    assert not seeding._may_have_accelerator()
    monkeypatch.setattr(seeding, "_CUDA_NODES", ("no-such-device*", "nul[a-l]"))
    assert seeding._may_have_accelerator()
