"""The engine: texts as if each were alone, fair turns, cancellation, faults that stay where they are."""

import threading
import time

import pytest
import torch

pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

from fsdfm.generate.invariant import BUCKET, BatchInvariant
from fsdfm.serve.engine import CancelledJobError, Engine, EngineStoppedError, ExpiredJobError, Job, QueueFullError
from live_server import tiny_models

MODELS = tiny_models()


class Bench:
    """Jobs and their ends."""

    def __init__(self):
        self.ended, self.order = threading.Semaphore(0), []

    def job(self, lm, request, on_state=None, deadline=float("inf"), **options):
        def end(job):
            self.order.append(job)
            self.ended.release()

        config = lm.sampler_config(**options)
        return Job(lm=lm, request=request, config=config, on_end=end, on_state=on_state, deadline=deadline)

    def wait(self, count):
        for _ in range(count):
            assert self.ended.acquire(timeout=60)


@pytest.fixture
def bench():
    return Bench()


def started(**options):
    return Engine(threads=1, **options).start()


def mixed_requests(lm):
    encoder = lm.encoder
    yield encoder.continuation("Once", None, length=24), {"steps": 3, "seed": 1}
    yield encoder.continuation("Twice", "end", length=24), {"steps": 5, "seed": 2, "temperature": 0.7}
    yield encoder.continuation(None, None, length=32), {"steps": 1, "seed": 3, "top_p": 0.9}
    yield encoder.continuation(None, None, length=70), {"steps": 2, "seed": 4}  # several blocks
    yield encoder.gaps("a [[5]] b [[3]] c"), {"steps": 4, "seed": 5, "jump": "single"}
    if lm is not MODELS["mask"]:
        yield encoder.damaged("a damaged text of no sense"), {"steps": 2, "seed": 6}  # estimates its start
    yield encoder.damaged("a damaged text of no sense", [(2, 9)]), {"steps": 2, "seed": 6, "jump": "spaced"}


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_texts_under_load_are_bit_for_bit_those_made_alone(bench, batch):
    plan = [(lm, *each) for lm in MODELS.values() for each in mixed_requests(lm)]
    jobs = [bench.job(lm, request, **options) for lm, request, options in plan]
    engine = started(batch=batch, running=9)
    for job in jobs:  # they join while others run
        engine.submit([job])
    bench.wait(len(jobs))
    engine.stop()
    for job, (lm, request, options) in zip(jobs, plan, strict=True):
        assert job.error is None
        alone, found = lm.run([request], **options)[0], job.run.results()[0]
        assert found.tokens == alone.tokens
        assert found.last_changed == alone.last_changed
        assert found.calls == alone.calls


def test_padded_texts_under_load_are_bit_for_bit_those_made_alone(bench):
    """As on a GPU: several samples a call, padded to the end of their bucket."""
    models = list(tiny_models().values())
    for lm in models:
        lm.network = BatchInvariant(lm.checkpoint.model, lm.runtime, rows=4)
    plan = [
        (lm, lm.encoder.continuation("Once", None, length=length), {"steps": steps, "seed": length})
        for lm in models
        for length, steps in ((17, 2), (20, 3), (31, 1), (32, 2), (45, 2))
    ]
    jobs = [bench.job(lm, request, **options) for lm, request, options in plan]
    engine = Engine(threads=1, batch=4)
    engine.submit(jobs)
    engine.start()
    bench.wait(len(jobs))
    engine.stop()
    for job, (lm, request, options) in zip(jobs, plan, strict=True):
        assert job.error is None
        assert job.run.results()[0].tokens == lm.run([request], **options)[0].tokens


def test_texts_of_one_bucket_share_calls(bench):
    lm = MODELS["tiny"]
    jobs = [bench.job(lm, lm.encoder.continuation("a", None, length=length), steps=3) for length in (17, 20, 31, 32)]
    far = bench.job(lm, lm.encoder.continuation("a", None, length=8 + BUCKET), steps=3)  # two blocks of another size
    engine = Engine(threads=1, batch=4)
    engine.submit(jobs)
    engine.start()
    bench.wait(4)
    assert engine.metrics.calls._value.get() == 3
    engine.submit([far])
    bench.wait(1)
    engine.stop()
    assert far.error is None


def test_calls_are_shared_by_texts_at_different_steps(bench):
    lm = MODELS["tiny"]
    requests = [lm.encoder.continuation(word, None, length=24) for word in ("a", "b", "c", "d")]
    jobs = [bench.job(lm, request, steps=steps) for request, steps in zip(requests, (2, 3, 4, 5), strict=True)]
    engine = Engine(threads=1, batch=4)
    engine.submit(jobs)
    engine.start()
    bench.wait(4)
    engine.stop()
    assert engine.metrics.calls._value.get() == 5  # not 2 + 3 + 4 + 5


def test_a_short_text_passes_a_long_one(bench):
    lm = MODELS["tiny"]
    long = bench.job(lm, lm.encoder.continuation(None, None, length=32), steps=400)
    short = bench.job(lm, lm.encoder.continuation(None, None, length=8), steps=2)
    engine = started()
    engine.submit([long])
    engine.submit([short])
    bench.wait(2)
    engine.stop()
    assert bench.order == [short, long]


def test_a_cancelled_text_ends_before_its_next_step(bench):
    lm, steps = MODELS["tiny"], []
    request = lm.encoder.continuation(None, None, length=16)
    engine = started()
    job = bench.job(
        lm, request, steps=1000, on_state=lambda job, state: (steps.append(state.step), engine.cancel([job]))
    )
    engine.submit([job])
    bench.wait(1)
    engine.stop()
    assert isinstance(job.error, CancelledJobError)
    assert len(steps) <= 2


def test_a_deadline_ends_what_runs_and_what_waits(bench):
    lm = MODELS["tiny"]
    request = lm.encoder.continuation(None, None, length=32)
    engine = started(running=1)
    jobs = [bench.job(lm, request, steps=1000, deadline=time.monotonic() + 0.2) for _ in range(2)]
    engine.submit(jobs)
    bench.wait(2)
    engine.stop()
    assert all(isinstance(job.error, ExpiredJobError) for job in jobs)


def test_a_full_queue_takes_all_of_a_request_or_nothing(bench):
    lm = MODELS["tiny"]
    request = lm.encoder.continuation(None, None, length=8)
    engine = Engine(running=1, waiting=2)  # not started: nothing moves
    jobs = [bench.job(lm, request, steps=1) for _ in range(4)]
    engine.submit(jobs[:2])
    with pytest.raises(QueueFullError) as full:
        engine.submit(jobs[2:])
    assert full.value.retry_after >= 1
    assert engine.load == (0, 2)
    engine.submit(jobs[2:3])
    engine.start()
    bench.wait(3)
    engine.stop()


def test_a_fault_of_one_text_is_its_own(bench):
    lm = MODELS["tiny"]
    request = lm.encoder.continuation(None, None, length=16)

    def fail(job, state):
        raise ZeroDivisionError

    jobs = [bench.job(lm, request, steps=3, on_state=fail if place == 1 else None) for place in range(3)]
    engine = started()
    engine.submit(jobs)
    bench.wait(3)
    assert isinstance(jobs[1].error, ZeroDivisionError)
    assert jobs[0].error is None
    assert jobs[2].error is None
    again = bench.job(lm, request, steps=1)
    engine.submit([again])
    bench.wait(1)
    engine.stop()
    assert again.error is None


def test_a_network_call_that_fails_for_several_is_tried_for_each(bench, monkeypatch):
    lm = tiny_models()["tiny"]
    asked, ask = [], lm.network.posteriors

    def posteriors(questions):
        asked.append(len(questions))
        if len(questions) > 1:
            raise torch.OutOfMemoryError("too much at once")
        return ask(questions)

    monkeypatch.setattr(lm.network, "posteriors", posteriors)
    jobs = [bench.job(lm, lm.encoder.continuation(word, None, length=16), steps=2) for word in "ab"]
    engine = Engine(threads=1)
    engine.submit(jobs)
    engine.start()
    bench.wait(2)
    engine.stop()
    assert [job.error for job in jobs] == [None, None]
    assert asked == [2, 1, 1, 2, 1, 1]


def test_a_stopped_engine_leaves_nobody_waiting(bench):
    lm = MODELS["tiny"]
    request = lm.encoder.continuation(None, None, length=32)
    jobs = [bench.job(lm, request, steps=1000) for _ in range(3)]
    engine = started(running=2)
    engine.submit(jobs)
    engine.stop()
    bench.wait(3)
    assert all(isinstance(job.error, CancelledJobError) for job in jobs)
    with pytest.raises(EngineStoppedError):
        engine.submit(jobs)


def test_no_more_texts_run_than_allowed(bench):
    lm, running = MODELS["tiny"], []
    engine = Engine(threads=1, running=2)
    request = lm.encoder.continuation(None, None, length=8)
    jobs = [bench.job(lm, request, steps=3, on_state=lambda *_: running.append(engine.load[0])) for _ in range(4)]
    engine.submit(jobs)
    engine.start()
    bench.wait(4)
    engine.stop()
    assert max(running) == 2


def test_turns_are_shared_by_tokens(bench):
    """A text of a quarter of the tokens has four turns for one of the other's."""
    lm, steps = MODELS["tiny"], []
    engine = Engine(threads=1, batch=1)
    long, short = (
        bench.job(
            lm, lm.encoder.continuation(None, None, length=length), steps=8, on_state=lambda job, _: steps.append(job)
        )
        for length in (32, 8)
    )
    engine.submit([long, short])
    engine.start()
    bench.wait(2)
    engine.stop()
    before = steps[: len(steps) - steps[::-1].index(short)]  # until the short text ends
    assert bench.order == [short, long]
    assert sum(job is long for job in before) <= 5


def test_texts_given_up_are_counted(bench):
    lm = MODELS["tiny"]
    request = lm.encoder.continuation(None, None, length=32)
    engine = started()
    late = bench.job(lm, request, steps=1000, deadline=time.monotonic())
    gone = bench.job(lm, request, steps=1000)
    gone.cancelled = True
    engine.submit([late, gone])
    bench.wait(2)
    engine.stop()
    counts = {reason: engine.metrics.cancelled.labels(reason)._value.get() for reason in ("timeout", "cancelled")}
    assert counts == {"timeout": 1, "cancelled": 1}


def test_whoever_is_refused_waits_a_second_at_least(bench):
    lm = MODELS["tiny"]
    request = lm.encoder.continuation(None, None, length=8)
    with pytest.raises(QueueFullError) as full:
        Engine(running=1, waiting=0).submit([bench.job(lm, request, steps=1) for _ in range(2)])
    assert full.value.retry_after == 1  # nobody waits: the present text ends soon
