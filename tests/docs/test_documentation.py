"""README and docs: links resolve, examples are valid, and commands exist and run.

The words after the language of a fenced block define how it is checked:

- `console`: each line that starts with `$ ` is run, in a folder with the examples of its page. With a second word it is
  only parsed: `stack` needs a running stack, `cluster` a cluster, `gpu` a GPU, `long` minutes; `skip` is not checked.
  A block without a prompt holds only commands, which are parsed.
- `yaml NAME.yaml`: an example, validated by what reads such a file. `yaml fragment` is a part of a recipe. A block
  without a word is settings if its keys are sections of them; otherwise, and with `theirs`, it is only parsed as YAML.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer
import yaml

from api.routes.v1.datasets import Preparation
from docs.generate import FOLDER, render_pages
from hanzo_ml.cli import app
from hanzo_ml_assets.definition_schema import DatasetDefinition, ModelDefinition
from recipes.contracts.command_job import CommandJob
from recipes.contracts.recipe import Recipe
from resources.hpo.sweep_config import SweepConfig
from resources.jobs.submission import NewJob
from resources.settings.settings import SECTIONS, Settings

REPOSITORY = FOLDER.parent
PAGES = sorted([*REPOSITORY.glob("*.md"), *FOLDER.glob("**/*.md")])
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)")
PROMPT = "$ "
PARSED_ONLY = ("stack", "cluster", "gpu", "long")
OTHER_PROGRAMS = ("aws", "cat", "cd", "curl", "export", "git", "kubectl", "pg_dump", "pg_restore", "pip", "python", "ssh")
"""Third-party programs, whose arguments are not checked.

Those of Python are checked if they name our code.
"""
TARGET = re.compile(r"^([\w-]+(?: [\w-]+)*):(?!=)", re.MULTILINE)
KNOWN_VARIABLES = {"S3_HOST": "s3.example.com", "SHOP_URL": "postgresql://reader:x@db.example.com/shop"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after it, and its text."""

    page: Path
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def commands(self) -> list[str]:
        """Return the lines after a prompt, or all lines without one, with continuations joined."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith(PROMPT)]
        return prompted or [line for line in lines if line.strip()]

    @property
    def runs_here(self) -> bool:
        return not self.words and self.text.startswith(PROMPT)


def read_blocks(page: Path) -> Iterator[Block]:
    for found in FENCE.finditer(page.read_text(encoding="utf-8")):
        language, *words = found["info"].split() or [""]
        yield Block(page, language, tuple(words), found["text"])


def name_page(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
CONSOLE = [block for block in BLOCKS if block.language == "console"]
YAML = [block for block in BLOCKS if block.language == "yaml"]


def identify_block(value: object) -> str | None:
    return f"{name_page(value.page)}-{'-'.join(value.words) or 'run'}" if isinstance(value, Block) else None


@cache
def list_anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = [
        re.sub(r"[*`]|\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    ]
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def find_broken_links(page: Path) -> Iterator[str]:
    """Yield relative links of a page to a missing file or heading."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    for found in LINK.finditer(text):
        target = found["target"]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or not file.is_relative_to(REPOSITORY):
            yield f"{target}: there is no such file"
        elif anchor and anchor not in list_anchors(file):
            yield f"{target}: {name_page(file)} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert list(find_broken_links(page)) == []


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A title\n\n[a](#a-title) [b](#b-title) [c](other.md) ![d](page.md#a-title)\n```\n[e](none.md)\n```\n")
    assert [problem.partition(":")[0] for problem in find_broken_links(page)] == ["#b-title", "other.md"]


def test_every_page_is_linked_from_the_index() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    missing = [page.name for page in FOLDER.glob("*.md") if page.name != "index.md" and f"({page.name})" not in index]
    assert missing == []


@pytest.mark.parametrize("name", ["cli.md", "settings.md", "specification.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == render_pages()[name], "run `make docs`, and commit what it changed"


def test_every_setting_and_option_is_described() -> None:
    """An empty last cell is a key or an option without a description."""
    empty = [line for text in render_pages().values() for line in text.splitlines() if line.endswith("|  |")]
    assert empty == []


def command_parameters(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that a command line names, and its arguments."""
    command, rest = typer.main.get_command(app), words
    while commands := getattr(command, "commands", None):
        if not rest or rest[0].startswith("-"):
            break
        assert rest[0] in commands, f"there is no command `{rest[0]}`: {', '.join(commands)}"
        command, rest = commands[rest[0]], rest[1:]
    return command, rest


def check_words(words: list[str], page: Path) -> None:
    """Raise if one of our commands does not exist or does not take these arguments."""
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    program, *arguments = words
    if program == "hanzo-ml":
        command, rest = command_parameters(arguments)
        if "--help" not in rest:
            command.make_context(shlex.join(words), rest)
    elif program == "make":
        rules = TARGET.findall((REPOSITORY / "Makefile").read_text(encoding="utf-8"))
        targets = {name for rule in rules for name in rule.split()}
        unknown = [word for word in arguments if "=" not in word and word not in targets]
        assert not unknown, f"the Makefile has no target {unknown}"
    elif program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]), f"there is no module {arguments[1]}"
    elif program == "python" and arguments[0].startswith("benchmarks/"):
        assert (REPOSITORY / arguments[0]).is_file()
    else:
        assert program in OTHER_PROGRAMS, f"{name_page(page)} shows a program that is not known: {program}"


def split_pipe(command: str) -> list[list[str]]:
    """Return the words of each command of a pipe, without comments."""
    words = shlex.split(command, comments=True)
    ends = [place for place, word in enumerate(words) if word == "|"]
    starts = [0, *(end + 1 for end in ends)]
    return [words[start:end] for start, end in zip(starts, [*ends, len(words)], strict=True)]


@pytest.mark.parametrize("block", CONSOLE, ids=identify_block)
def test_commands_exist_with_their_arguments(block: Block) -> None:
    kind = block.words[0] if block.words else ""
    assert kind in ("", "skip", *PARSED_ONLY), f"unknown kind of console block: {kind}"
    for command in block.commands if kind != "skip" else ():
        for words in split_pipe(command):
            check_words(words, block.page)


@pytest.mark.parametrize(
    "command", ["hanzo-ml dataset make", "hanzo-ml job list --newest", "hanzo-ml model prove x", "make tests", "rm -r /"]
)
def test_wrong_commands_are_found(command: str) -> None:
    with pytest.raises(BaseException, match=r"there is no command|No such option|Missing|no target|not known"):
        check_words(shlex.split(command), FOLDER / "index.md")


def validate_example(name: str, document: Mapping[str, Any]) -> None:
    """Validate an example with the model that reads such a file."""
    if name.startswith("sweep"):
        SweepConfig.model_validate(document)
    elif name.startswith("prepare"):
        Preparation.model_validate(document)
    elif "job" in name and "command" in document:
        CommandJob.model_validate({key: value for key, value in document.items() if key != "code"})
    elif "job" in name:
        job = NewJob.model_validate(document)
        assert job.recipe, "name a recipe that is shipped"
        Recipe.named(job.recipe).changed(job.parameters)
    elif name.startswith("defs"):
        schema = DatasetDefinition if document["type"].endswith(".Dataset") else ModelDefinition
        schema.model_validate(document["attributes"])
    else:
        Recipe.model_validate(document)


@pytest.mark.parametrize("block", YAML, ids=identify_block)
def test_yaml_examples_are_valid(block: Block, tmp_path: Path) -> None:
    name = block.words[0] if block.words else ""
    document = yaml.safe_load(block.text)
    if name.startswith("config") or (not name and document.keys() <= SECTIONS.keys()):
        path = tmp_path / "config.yaml"
        path.write_text(block.text)
        Settings.load({"HANZO_ML_CONFIG": str(path), "HANZO_ML_HOME": str(tmp_path), **KNOWN_VARIABLES})
    elif name == "fragment":
        whole = yaml.safe_load((REPOSITORY / "recipes" / "smollm2-135m-full.yaml").read_text())
        Recipe.model_validate(whole | document)
    elif name not in ("", "theirs"):
        assert name.endswith(".yaml"), f"unknown kind of YAML block: {name}"
        validate_example(name, document)


RUNNABLE = [block for block in CONSOLE if block.runs_here]


@pytest.fixture
def example_folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with a script, like that of a reader of the page."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print('step 0')\n")
    (tmp_path / "train.py").write_text("print('step 0')\n")
    yield tmp_path


def runs_here(command: str) -> bool:
    """Return whether the command is ours, and neither installs nor tests anything."""
    return command.startswith("hanzo-ml ")


@pytest.mark.parametrize(
    ("block", "command"),
    [(block, command) for block in RUNNABLE for command in block.commands if runs_here(command)],
    ids=lambda value: value if isinstance(value, str) else name_page(value.page),
)
def test_commands_run(block: Block, command: str, example_folder: Path) -> None:
    for example in YAML:
        if example.page == block.page and example.words and example.words[0].endswith(".yaml"):
            (example_folder / example.words[0]).write_text(example.text)
    # The ports of tests stay: a stack of the developer may listen on the default ones.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("HANZO_ML_") or name.endswith("_PORT")
    }
    done = subprocess.run(
        [sys.executable, "-m", "hanzo_ml", *shlex.split(command)[1:]],
        cwd=example_folder,
        env={**environment, "HANZO_ML_HOME": str(example_folder / "home"), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_no_page_names_a_path_of_a_machine() -> None:
    """Nor a row of the acceptance table, which is not in the repository."""
    wrong = re.compile(r"/(?:home|root|work|Users)/[a-z]|\brows? [A-Z]\d")
    found = [
        f"{name_page(page)}: {match[0]}" for page in PAGES for match in wrong.finditer(page.read_text(encoding="utf-8"))
    ]
    assert found == []
