"""When a running job is in trouble: silence beyond the limits, each silence one alert, and none before there is cause."""

from dataclasses import replace

import pytest

from resources.monitoring.run_health import (
    CHECKPOINT_STALE,
    STALLED,
    RunActivity,
    SilenceLimits,
    find_alerts,
    format_duration,
)

MINUTE = 60_000
LIMITS = SilenceLimits(metric=15 * MINUTE, checkpoint=90 * MINUTE)
WELL = RunActivity(last_started_at=0, first_metric=2 * MINUTE, newest_metric=200 * MINUTE, newest_checkpoint=180 * MINUTE)


def test_a_run_that_speaks_and_saves_gives_none() -> None:
    assert list(find_alerts(WELL, LIMITS, now=201 * MINUTE)) == []


@pytest.mark.requirement("Y5")
def test_silence_is_one_occurrence_however_often_it_is_looked_at() -> None:
    first, later = (list(find_alerts(WELL, LIMITS, now=minute * MINUTE)) for minute in (216, 260))
    assert first == later
    assert [(alert.type, alert.since) for alert in first] == [(STALLED, 200 * MINUTE)]
    again = replace(WELL, newest_metric=230 * MINUTE)
    assert [alert.since for alert in find_alerts(again, LIMITS, now=250 * MINUTE)] == [230 * MINUTE]


def test_a_run_that_never_spoke_is_stalled_and_its_checkpoints_are_not_late() -> None:
    silent = RunActivity(last_started_at=5 * MINUTE, first_metric=None, newest_metric=None, newest_checkpoint=None)
    assert list(find_alerts(silent, LIMITS, now=20 * MINUTE)) == []
    assert [(alert.type, alert.since) for alert in find_alerts(silent, LIMITS, now=120 * MINUTE)] == [(STALLED, 5 * MINUTE)]


@pytest.mark.requirement("I4")
def test_checkpoints_that_stay_away_are_told_of_from_the_first_metric_or_the_newest_one() -> None:
    never = replace(WELL, newest_checkpoint=None)
    assert [(alert.type, alert.since) for alert in find_alerts(never, LIMITS, now=201 * MINUTE)] == [
        (CHECKPOINT_STALE, 2 * MINUTE)
    ]
    old = replace(WELL, newest_metric=280 * MINUTE)
    assert [(alert.type, alert.since) for alert in find_alerts(old, LIMITS, now=281 * MINUTE)] == [
        (CHECKPOINT_STALE, 180 * MINUTE)
    ]


def test_a_run_that_is_resumed_days_later_is_not_in_trouble_for_its_past() -> None:
    resumed = replace(WELL, last_started_at=9000 * MINUTE)
    assert list(find_alerts(resumed, LIMITS, now=9010 * MINUTE)) == []


def test_a_short_limit_is_told_as_what_it_is() -> None:
    short = SilenceLimits(metric=20_000, checkpoint=22.5 * MINUTE)
    told = [alert.message for alert in find_alerts(replace(WELL, newest_metric=181 * MINUTE), short, now=210 * MINUTE)]
    assert told == ["no metric for more than 20 seconds", "no checkpoint in the store for more than 22.5 minutes"]


@pytest.mark.parametrize(
    ("limit", "said"), [(1000, "1 second"), (1500, "1.5 seconds"), (MINUTE, "60 seconds"), (2 * MINUTE, "2 minutes")]
)
def test_one_second_is_one(limit: float, said: str) -> None:
    assert format_duration(limit) == said
