"""Health of running jobs: each silence beyond its limit raises exactly one alert."""

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


def test_healthy_run_gives_no_alert() -> None:
    assert list(find_alerts(WELL, LIMITS, now=201 * MINUTE)) == []


@pytest.mark.requirement("Y5")
def test_silence_is_one_occurrence_over_repeated_checks() -> None:
    first, later = (list(find_alerts(WELL, LIMITS, now=minute * MINUTE)) for minute in (216, 260))
    assert first == later
    assert [(alert.type, alert.since) for alert in first] == [(STALLED, 200 * MINUTE)]
    again = replace(WELL, newest_metric=230 * MINUTE)
    assert [alert.since for alert in find_alerts(again, LIMITS, now=250 * MINUTE)] == [230 * MINUTE]


def test_run_that_never_logged_is_stalled_without_a_checkpoint_alert() -> None:
    silent = RunActivity(last_started_at=5 * MINUTE, first_metric=None, newest_metric=None, newest_checkpoint=None)
    assert list(find_alerts(silent, LIMITS, now=20 * MINUTE)) == []
    assert [(alert.type, alert.since) for alert in find_alerts(silent, LIMITS, now=120 * MINUTE)] == [(STALLED, 5 * MINUTE)]


@pytest.mark.requirement("I4")
def test_stale_checkpoints_are_reported_since_the_first_metric_or_newest_checkpoint() -> None:
    never = replace(WELL, newest_checkpoint=None)
    assert [(alert.type, alert.since) for alert in find_alerts(never, LIMITS, now=201 * MINUTE)] == [
        (CHECKPOINT_STALE, 2 * MINUTE)
    ]
    old = replace(WELL, newest_metric=280 * MINUTE)
    assert [(alert.type, alert.since) for alert in find_alerts(old, LIMITS, now=281 * MINUTE)] == [
        (CHECKPOINT_STALE, 180 * MINUTE)
    ]


def test_run_resumed_days_later_gives_no_alert_for_its_past() -> None:
    resumed = replace(WELL, last_started_at=9000 * MINUTE)
    assert list(find_alerts(resumed, LIMITS, now=9010 * MINUTE)) == []


def test_short_limit_is_shown_in_its_own_unit() -> None:
    short = SilenceLimits(metric=20_000, checkpoint=22.5 * MINUTE)
    messages = [alert.message for alert in find_alerts(replace(WELL, newest_metric=181 * MINUTE), short, now=210 * MINUTE)]
    assert messages == ["no metric for more than 20 seconds", "no checkpoint in the store for more than 22.5 minutes"]


@pytest.mark.parametrize(
    ("limit", "said"), [(1000, "1 second"), (1500, "1.5 seconds"), (MINUTE, "60 seconds"), (2 * MINUTE, "2 minutes")]
)
def test_duration_is_formatted_in_singular_or_plural(limit: float, said: str) -> None:
    assert format_duration(limit) == said
