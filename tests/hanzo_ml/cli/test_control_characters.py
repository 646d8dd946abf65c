"""Control characters of others are escaped by every command.

They may be in names, values of records, reasons and responses.
"""

from collections.abc import Callable

import pytest

from hanzo_ml.cli.dataset import print_diff
from hanzo_ml.cli.dataset_checks import print_checks
from hanzo_ml.cli.job_polling import print_note
from hanzo_ml.cli.lineage import print_data, print_traces
from hanzo_ml.cli.model import print_proof

EVIL = "[red]\\[/x]\x1b]0;mine\x07\x1b[31m\x9b2J\x7f\x08"
SHOWN = "[red]\\[/x]^[]0;mine^G^[[31m\\x9b2J^?^H"

PROVED = {"label": EVIL, "digest": EVIL[-9:], "files": 1, "size_bytes": 1, "facts": {"uri": EVIL}, "problems": [EVIL]}
CHAIN = {**PROVED, "made_from": [{**PROVED, "made_from": [], "seen_above": True}], "seen_above": False}
PROOF = {"chain": CHAIN, "ok": False, "broken": [EVIL], "bytes_hashed": 1}
RUN = {"kind": "run", "name": EVIL, "facts": {"used": [EVIL], "status": EVIL}, "reached": [], "seen_above": False}
TRACE = {"record": 1, "preview": EVIL, "found": True, "totals": {"run": 1}, "live": [EVIL]}
USE = {"dataset": EVIL, "records": 2, "digest": EVIL[-9:], "splits": {EVIL: 2}, "made_of": [EVIL], "transform": {EVIL: EVIL}}
DATA = {
    "name": EVIL,
    "version": 1,
    "datasets": [{**USE, "personal_data": {"included": EVIL, "found": {EVIL: 1}, "masked": None}}],
    "base_models": [EVIL],
    "logged": [{"name": EVIL, "digest": EVIL}],
    "personal_data": EVIL,
}
CHECKS = {
    "name": "d",
    "version": 1,
    "status": "blocked",
    "checks": [{"check": "c", "passed": False, "severity": "error", "blocking": True, "note": "", "reasons": [EVIL]}],
    "violations": {"first": [{"line": 3, "column": EVIL, "reason": EVIL, "value": EVIL}]},
}
DIFF = {
    **{which: {"reference": EVIL} for which in ("old", "new")},
    **dict.fromkeys(("added", "removed", "changed", "unchanged"), 1),
    "schema_added": {EVIL: EVIL},
    "schema_removed": {EVIL: EVIL},
    "schema_changed": {EVIL: [EVIL, EVIL]},
    "examples": {},
}


@pytest.mark.parametrize(
    ("printing", "times"),
    [
        pytest.param(lambda: print_proof(PROOF), 6, id="prove"),
        pytest.param(lambda: print_traces([{**TRACE, "reached": [RUN, {**RUN, "seen_above": True}]}], None), 7, id="trace"),
        pytest.param(lambda: print_data(DATA), 12, id="data"),
        pytest.param(lambda: print_checks(CHECKS), 4, id="check"),
        pytest.param(lambda: print_diff(DIFF), 9, id="diff"),
        pytest.param(lambda: print_note(EVIL), 1, id="waiting"),
    ],
)
def test_control_characters_of_foreign_text_are_escaped(
    printing: Callable[[], None], times: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    printing()
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert not {each for each in said if not each.isprintable()} - {"\n"}, said
    assert said.count(SHOWN) == times, said
