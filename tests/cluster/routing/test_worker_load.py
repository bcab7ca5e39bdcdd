"""Does the planner know what a worker has to do, from an old report and what was sent since?"""

from __future__ import annotations

import pytest

from ripresa.cluster.routing.worker_load import PlannerSettings, WorkerLoad, worker_loads
from ripresa.workers.report import WorkerKind, WorkerReport
from ripresa.workers.request import EngineStats, WorkCounters
from ripresa.workers.scheduling.step_rates import Rates

SETTINGS = PlannerSettings(encoder_row_s=0.5, decoder_row_s=0.25, decode_step_s=3.0)


def load(
    rows: int, *, pending: int = 0, age_s: float = 0.0, rates: Rates | None = None
) -> WorkerLoad:
    stats = EngineStats(
        *(1, 2, 8, 8, 0, WorkCounters(), 0, 0),
        num_queued_rows=rows,
        num_decoding=1,
        rates=rates or Rates(),
    )
    report = WorkerReport("w", WorkerKind.DECODE, "node", 1, 1, stats)
    (found,) = worker_loads([report], {"w": pending}, {"w": 1}, SETTINGS, lambda name: age_s)
    return found


def test_defaults_hold_until_a_worker_has_measured() -> None:
    assert (load(4).row_s, load(4).decode_step_s, load(4).queue_s) == (0.25, 3.0, 1.0)
    measured = load(4, rates=Rates(0.125, 2.0))
    assert (measured.row_s, measured.decode_step_s, measured.queue_s) == (0.125, 2.0, 0.5)


@pytest.mark.parametrize(
    ("rows", "pending", "age_s", "queued"),
    [(40, 0, 0.0, 40), (40, 0, 5.0, 20), (40, 0, 60.0, 0), (40, 30, 5.0, 30), (0, 7, 60.0, 7)],
)
def test_a_queue_goes_on_while_its_report_grows_old(
    rows: int, pending: int, age_s: float, queued: int
) -> None:
    assert load(rows, pending=pending, age_s=age_s).queued_rows == queued


def test_streams_lengthen_every_chunk_of_a_local_prompt() -> None:
    assert load(0).prefill_s(100, None) == 100 * 0.25 + 3.0
    assert load(0).prefill_s(100, 40) == 100 * 0.25 + 3 * 3.0
