"""Validation report: one self-contained page in a real browser, with all user text escaped."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.dataset_contract import Measures, Slices, ValidateParameters
from recipes.contracts.validation_results import Leak, Leaks, Statistics, ValidationFacts
from recipes.storage.manifest import Artifact
from recipes.validate import validate_records
from recipes.validation.drift import compare_versions
from recipes.validation.record_blocks import iterate_lines
from resources.datasets.check_policy import Checks
from resources.datasets.check_verdicts import judge_splits, judge_version
from resources.datasets.validation_report import render_report
from resources.datasets.validations import Validation, blocking_reason
from resources.metadata.datasets import DatasetVersion
from tests.support.browser_page import page

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&"
NOW = 1_790_000_000_000


@pytest.fixture
def document(tmp_path: Path) -> Iterator[str]:
    before, _ = described(tmp_path, [{"text": f"The keeper of lamp {n}", "kind": "ab"[n % 2]} for n in range(60)])
    rows: list[dict[str, Any]] = [{"text": f"{EVIL} {n} ann@example.com", "kind": EVIL, EVIL: n % 7} for n in range(60)]
    statistics, facts = described(tmp_path, rows, before)
    leaks = Leaks(
        tested=6,
        searched=1,
        exact=1,
        near=0,
        by_ancestor={EVIL: 1},
        first=(Leak(line=1, text=EVIL, match="exact", similarity=1, ancestor=EVIL, ancestor_line=2),),
    )
    checks = Checks.model_validate({"personal_data": {"severity": "error", "blocking": True}})
    verdicts = judge_version(facts, statistics, checks, Measures(), created_at=NOW, now=NOW)
    verdicts.append(judge_splits(leaks, checks))
    artifact = Artifact(kind="dataset", uri="s3://hanzo-ml/datasets/d/2", digest="a" * 64, size_bytes=5)
    validation = Validation("id", artifact, facts, leaks, tuple(verdicts), blocking_reason("d@2", verdicts), NOW, "d@1")
    version = DatasetVersion(
        id="id",
        name="d",
        version=2,
        organization="default",
        created_at=NOW,
        created_by=EVIL,
        storage_path="s3://x/",
        format="jsonl",
        size_bytes=5,
        num_records=60,
        schema={},
        splits={},
        metadata={},
        tags=[EVIL],
        lineage={"parent_datasets": [EVIL], "transform": {"x": EVIL}},
        content_sha256="b" * 64,
        artifact=artifact,
    )
    yield render_report(version, validation, statistics, before)


def described(
    folder: Path, rows: list[dict[str, Any]], before: Statistics | None = None
) -> tuple[Statistics, ValidationFacts]:
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    measures = Measures(slices=Slices(columns=("kind",), label="kind"))
    statistics, violations = validate_records(
        iterate_lines([file]), ValidateParameters(measures=measures), len(rows), folder
    )
    drift = compare_versions("d@1", before, statistics) if before is not None else None
    return statistics, ValidationFacts(violations=violations, drift=drift)


def test_report_escapes_markup_in_the_data(document: str) -> None:
    assert "<script" not in document
    assert "<img" not in document
    assert document.count("onerror=alert(1)&gt;") == document.count("onerror=alert(1)") > 10


def test_report_loads_no_external_resource(document: str) -> None:
    outside = re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://[^"\s<]+""", document.replace(EVIL, ""))
    assert set(outside) <= {"http://www.w3.org/2000/svg", "src="}
    assert "src=x" in document  # the one in the data's own text, which is escaped


@pytest.mark.requirement("B17")
def test_report_shows_all_its_parts_in_a_browser(document: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(document, encoding="utf-8")
    parts = ("Checks", "Schema and completeness", "Distributions", "Drift from d@1", "Slices", "Lineage", "Sample records")
    shown = page(file.as_uri(), *(f"<h2>{part}</h2>" for part in parts))
    assert "Blocked: nothing is split or trained" in shown
    assert "<title>d@2 - dataset report</title>" in shown
    assert shown.count("<svg") >= 5
