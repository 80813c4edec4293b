"""What vLLM's logger and metrics are told of loads, each once."""

from kvbus.integrations.vllm import stats
from kvbus.integrations.vllm.stats import StatsRecorder, no_figures
from kvbus.protocol import Fetched, Outcome, StageTimes

TIMES = StageTimes(claiming=0.25, reading=0.5)


def ended(outcome: Outcome, stage: str) -> Fetched:
    return Fetched("f", "r", outcome, stage, blocks_free=True, num_bytes=8, stages_s=TIMES)


def test_a_completed_load_has_its_time_its_bytes_and_the_stages_that_it_came_to() -> None:
    recorder = StatsRecorder()
    recorder.add_load(ended(Outcome.COMPLETED, "confirming"))

    assert recorder.take() == no_figures() | {
        stats.LOADS: ["completed"],
        stats.LOAD_SECONDS: [0.75],
        stats.LOAD_BYTES: [8],
        stats.LOAD_STAGE_SECONDS: [("claiming", "completed", 0.25), ("reading", "completed", 0.5)],
    }
    assert recorder.take() is None


def test_a_failed_load_has_its_stage_and_how_long_it_was_in_each() -> None:
    recorder = StatsRecorder()
    recorder.add_load(ended(Outcome.FAILED, "reading"))

    assert recorder.take() == no_figures() | {
        stats.LOADS: ["failed"],
        stats.LOADS_FAILED: ["reading"],
        stats.LOAD_STAGE_SECONDS: [("claiming", "failed", 0.25), ("reading", "failed", 0.5)],
    }


def test_a_load_that_vllm_gave_up_has_not_failed_whatever_became_of_it() -> None:
    recorder = StatsRecorder()
    for outcome in (Outcome.CANCELLED, Outcome.FAILED, Outcome.COMPLETED):
        recorder.add_load(ended(outcome, "reading"), given_up=True)

    figures = recorder.take()
    assert figures is not None
    assert figures[stats.LOADS] == ["cancelled"] * 3
    assert not figures[stats.LOADS_FAILED]
    assert not figures[stats.LOAD_SECONDS]
