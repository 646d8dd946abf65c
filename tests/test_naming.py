"""Names that an engineer would search for, and folders of readable size.

`naming_baseline.txt` holds the names that broke a rule when the rule was introduced. It may only shrink: a new name that
breaks a rule fails, and so does an entry that is no longer needed.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("recipes", "resources", "hanzo_ml_assets", "sensors", "api", "hanzo_ml")
BASELINE = Path(__file__).with_name("naming_baseline.txt")

MAX_MODULES_PER_FOLDER = 20
IDIOMS = {"told", "tell", "tells", "anew", "whoever", "beside", "taking", "brought", "looks", "looked"}
"""Words of no meaning in the field: say log, report, restart, caller, snapshot, poll."""
PHRASES = ("goes_on", "go_on", "going_on", "is_left", "what_is", "what_", "who_", "something_", "nothing_")
PARTICIPLE = re.compile(
    "taken|given|kept|found|left|made|had|seen|asked|said|owed|used|held|let|lost|sent|done|gone|drawn|waited|wanted|counted"
    "|spread|hidden|broken|frozen"
)
"""Not a name by themselves: a participle says what happened and not what the thing is."""
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def test_folder_holds_at_most_twenty_modules() -> None:
    folders = {path.parent for root in PRODUCT for path in (ROOT / root).rglob("*.py")}
    sizes = {folder: sum(1 for path in folder.glob("*.py") if path.name != "__init__.py") for folder in folders}
    crowded = {folder.relative_to(ROOT).as_posix(): size for folder, size in sizes.items() if size > MAX_MODULES_PER_FOLDER}
    assert not crowded, f"folders with more than {MAX_MODULES_PER_FOLDER} modules: {crowded}"


def test_names_follow_the_naming_rules() -> None:
    baseline = set(BASELINE.read_text().split("\n")) - {""}
    broken = {
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for path in modules()
        for name, stands_alone in names(path)
        if breaks_rule(name, stands_alone=stands_alone)
    }
    added, obsolete = sorted(broken - baseline), sorted(baseline - broken)
    assert not added, "rename (rules: CONTRIBUTING.md, Names): " + ", ".join(added)
    assert not obsolete, f"remove from {BASELINE.name}, these names are gone: " + ", ".join(obsolete)


def test_tests_share_code_by_the_support_folder_and_never_import_each_other() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.parent.name != "fixtures"  # scripts of earlier commits
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and re.match(r"tests\..*\btest_\w+$", node.module or "")
    ]
    assert not found, f"move what is shared to tests/support: {found}"


def test_rules_find_private_vocabulary_and_pass_standard_words() -> None:
    assert all(
        map(
            breaks_rule,
            ("told", "tell_used", "place_of", "runs_of_jobs", "is_left", "what_follows", "taken"),
        )
    )
    assert not any(map(breaks_rule, ("OUT_OF_MEMORY", "OutOfMemory", "end_of_file", "retry", "num_tokens", "offset")))


def modules() -> Iterator[Path]:
    for root in PRODUCT:
        yield from sorted((ROOT / root).rglob("*.py"))


def names(path: Path) -> Iterator[tuple[str, bool]]:
    """Names in a module, and whether each is a function, class or module."""
    if path.stem != "__init__":
        yield path.stem, True
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.arg):
            yield node.arg, False
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, False) for target in targets if isinstance(target, ast.Name))


def breaks_rule(name: str, *, stands_alone: bool = True) -> bool:
    words = [word.lower() for word in WORD.findall(name)]
    phrase = "_".join(words)
    if re.search(r"(?:^|_)(?:out_of|end_of|start_of|number_of|instance_of|point_of|proof_of)(?:_|$)", phrase):
        words = [word for word in words if word != "of"]
    return (
        bool(IDIOMS & set(words))
        or "of" in words
        or phrase.startswith(PHRASES)
        or any(f"_{idiom}" in f"_{phrase}" for idiom in ("goes_on", "go_on", "going_on", "is_left"))
        or (stands_alone and bool(PARTICIPLE.fullmatch(phrase)))
    )
