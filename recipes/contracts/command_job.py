"""The job file of a command job."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Base64Bytes,
    BaseModel,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from recipes.contracts.frozen_model import FrozenModel, Name
from recipes.contracts.job import Distributed, Hardware, Schedule
from recipes.contracts.pod_settings import Environment, PodSettings, Text
from recipes.contracts.validation_errors import explain_first_error
from recipes.storage import uris
from recipes.storage.artifact_store import MANIFEST_FILE
from recipes.storage.folder_tree import find_escaping_link, parents

RECIPE_KEYS = ("parameters", "recipe", "model")
"""Keys that only jobs without a command have."""
MAX_CODE_BYTES = 4 << 20
"""Limit for all source files together, which are sent in one request; data belongs in a dataset."""
SURROGATE = re.compile("[\ud800-\udfff]")
DATASET_URI = re.compile(rf"{uris.DATASETS}/([A-Za-z][\w.-]*)/([0-9]+)/?")
CHECKPOINTS_URI = re.compile(rf"{uris.CHECKPOINTS}(/[A-Za-z0-9][\w.=-]*)+/?")


Word = Annotated[Text, Field(min_length=1)]


class Script(FrozenModel):
    """Parameters of the program `command`: what a command job runs."""

    image: str | None = Field(None, min_length=1, description="on a cluster; default: scheduler.default_image")
    command: tuple[Word, ...] = Field(min_length=1)
    env: Environment = {}


class Storage(FrozenModel):
    """What the command reads, and where its checkpoints folder is stored."""

    datasets: str | None = None
    checkpoints: str | None = None

    @field_validator("datasets")
    @classmethod
    def names_a_version(cls, value: str | None) -> str | None:
        if value is not None and not DATASET_URI.fullmatch(value):
            raise ValueError(f"write {uris.DATASETS}/NAME/VERSION/, such as {uris.DATASETS}/my-data/1/")
        return value

    @field_validator("checkpoints")
    @classmethod
    def is_a_folder(cls, value: str | None) -> str | None:
        if value is not None and (not CHECKPOINTS_URI.fullmatch(value) or ".." in value):
            raise ValueError(f"write {uris.CHECKPOINTS}/FOLDER/, such as {uris.CHECKPOINTS}/my-model/")
        return value

    @property
    def dataset(self) -> str | None:
        """The dataset version in `datasets`, as NAME@VERSION."""
        found = DATASET_URI.fullmatch(self.datasets or "")
        return f"{found[1]}@{int(found[2])}" if found else None

    def checkpoints_uri(self, job_id: str) -> str:
        """Return the job's own folder.

        Checkpoints of other jobs in the same place stay untouched.
        """
        return f"{(self.checkpoints or uris.CHECKPOINTS).rstrip('/')}/{job_id}"


def describe_inline(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model without references to other models."""
    schema = model.model_json_schema()
    return {key: value for key, value in schema.items() if key not in ("title", "description")}


Mode = Annotated[int, Field(ge=0, le=0o777)]
Nanoseconds = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class SourceTree(FrozenModel):
    """Properties of source files that their text lacks, by path in the command's folder.

    Args:
        encoded: content in base64 of files that are not UTF-8 text, or whose name `files` does not allow.
        modes: permission bits other than the default (644; 755 for a file that starts with `#!`, and for a folder).
        modified_ns: modification times in nanoseconds.
        links: symbolic links and their targets, relative to the link's folder; they must stay inside the folder.
        folders: empty folders.
    """

    encoded: dict[str, Base64Bytes] = {}
    modes: dict[str, Mode] = {}
    modified_ns: dict[str, Nanoseconds] = {}
    links: dict[str, str] = {}
    folders: tuple[str, ...] = ()

    @model_validator(mode="after")
    def has_possible_paths(self) -> Self:
        for path in (*self.encoded, *self.links, *self.folders, *self.modes, *self.modified_ns):
            if path != MANIFEST_FILE and (problem := find_path_problem(path)):
                raise ValueError(f"{path!r} {problem}")
        for path, target in self.links.items():
            if not target or re.search(UNWRITABLE_CHARACTERS, target) or len(target) > MAX_PATH_LENGTH:
                raise ValueError(f"the target of the link {path!r} is not a path: {target!r}")
        if (escaping := find_escaping_link(self.links)) is not None:
            target = self.links[escaping]
            raise ValueError(f"the link {escaping!r} leads out of the folder, to {target!r}: copy the target instead")
        return self


def read_source_tree(value: Any) -> SourceTree:
    """Validate a source tree.

    Raises ValueError with the invalid key.
    """
    if isinstance(value, SourceTree):
        return value
    try:
        return SourceTree.model_validate(value)
    except ValidationError as error:
        raise ValueError(explain_first_error(error, SourceTree)) from None


InlineSourceTree = Annotated[
    Any,
    PlainValidator(read_source_tree),
    PlainSerializer(lambda tree: tree.model_dump(mode="json"), when_used="json"),
    WithJsonSchema(describe_inline(SourceTree)),
]
"""Has an inline schema, because client generators create a class per named schema."""


class CommandJob(Script):
    """The job file of a command job.

    Attributes:
        files: source files that the command needs, by path in its folder.
        git_commit: the commit of the checkout that they come from.
        source_tree: other contents and properties of the folder.
    """

    name: Name = Field(min_length=1, max_length=250)
    type: Literal["training", "eval", "conversion", "preprocessing"] = "training"
    resources: Hardware = Hardware()
    distributed: Distributed | None = None
    storage: Storage = Storage()
    schedule: Schedule = Schedule()
    pod: PodSettings = Field(PodSettings(), exclude_if=lambda value: value == PodSettings())
    files: dict[str, str] = {}
    source_tree: InlineSourceTree = Field(SourceTree(), exclude_if=lambda value: value == SourceTree())
    git_commit: str | None = Field(None, pattern=r"^[0-9a-f]{7,64}$")

    @model_validator(mode="before")
    @classmethod
    def has_no_recipe(cls, value: Any) -> Any:
        """Reject keys of recipe jobs.

        For `parameters` the generic check suggested the same word as its correction.
        """
        keys = value if isinstance(value, dict) else {}
        if "dataset" in keys:
            raise ValueError("'dataset' belongs to a recipe: with a `command`, name it by `storage: {datasets: ...}`")
        if found := next((key for key in RECIPE_KEYS if key in keys), None):
            raise ValueError(f"'{found}' belongs to a recipe: put arguments into the `command`, or leave that out")
        return value

    @field_validator("files")
    @classmethod
    def are_source_files(cls, value: dict[str, str]) -> dict[str, str]:
        for path in value:
            if problem := find_path_problem(path):
                raise ValueError(f"{path!r} {problem}")
            if parent := next((str(above) for above in PurePosixPath(path).parents if str(above) in value), None):
                raise ValueError(f"{path!r} is below {parent!r}, which is a file")
        if half := next((path for path, text in value.items() if SURROGATE.search(text)), None):
            raise ValueError(f"{half!r} contains half of a surrogate pair: save it as UTF-8")
        refuse_large_code(len(text.encode()) for text in value.values())
        return value

    @model_validator(mode="after")
    def has_one_entry_for_each_path(self) -> Self:
        tree: SourceTree = self.source_tree
        entries = Counter([*self.files, *tree.encoded, *tree.links, *tree.folders])
        if twice := next((path for path, count in entries.items() if count > 1), None):
            raise ValueError(f"source_tree: {twice!r} is there twice")
        known, below = {*entries}, {above for path in entries for above in parents(path)}
        if through := next(iter(sorted(below & known)), None):
            raise ValueError(f"source_tree: {through!r} must be an empty folder, but there is a path below it")
        if unknown := next((path for path in (*tree.modes, *tree.modified_ns) if path not in known | below), None):
            raise ValueError(f"source_tree: there is no {unknown!r} to have a mode or a time")
        refuse_large_code(map(len, (*(text.encode() for text in self.files.values()), *tree.encoded.values())))
        return self

    @property
    def experiment(self) -> str:
        return self.env.get("HANZO_ML_EXPERIMENT") or self.name

    @property
    def script(self) -> Script:
        return Script(image=self.image, command=self.command, env=self.env)


UNWRITABLE_CHARACTERS = r"[\x00-\x1f\x7f\\\ud800-\udfff]"
MAX_PATH_LENGTH = 500


def refuse_large_code(sizes: Iterable[int]) -> None:
    """Raise ValueError if source files exceed `MAX_CODE_BYTES`."""
    if (size := sum(sizes)) > MAX_CODE_BYTES:
        raise ValueError(f"{size} bytes of source files exceed the limit of {MAX_CODE_BYTES}: keep data in a dataset")


def find_path_problem(path: str) -> str | None:
    """Return why a source file cannot have this path, or None."""
    if not path or any(part in ("", ".", "..") for part in path.split("/")):
        return "is no path inside the folder of the command: write it relative, without '..'"
    if re.search(UNWRITABLE_CHARACTERS, path) or len(path) > MAX_PATH_LENGTH:
        return "holds a character that no path can have here, or is longer than 500"
    return "has the name of the list of all files: give it another" if path == MANIFEST_FILE else None
