"""Dataset token counts: with the training tokenizer if stored, equal to those of training."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import StoreAddress
from recipes.contracts.recipe import Recipe
from recipes.records.record_reader import read_records
from recipes.storage.artifact_store import Store
from recipes.training.data.examples import encode_examples
from recipes.training.data.preference_pairs import encode_pairs
from resources.estimate.token_count import count_dataset_tokens
from resources.ingest.version_creation import create_version
from resources.metadata.database import Database
from resources.metadata.datasets import DatasetVersion
from tests.recipes.tiny_model import make_tokenizer
from tests.support.migrated_database import migrate

BUCKETS = {"datasets": "hanzo-ml-datasets", "checkpoints": "hanzo-ml-checkpoints", "models": "hanzo-models"}
SHA = "1" * 64


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))
        self.database = Database(f"sqlite:///{folder}/metadata.db")
        migrate(self.database)

    def version(self, rows: list[dict[str, Any]]) -> DatasetVersion:
        path = self.folder / "raw.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made, _ = create_version(self.database, self.store, name="d", path=path, user="u", organization="default")
        return made

    def store_tokenizer(self) -> None:
        folder = self.folder / "tokenizer"
        make_tokenizer().save_pretrained(folder)
        self.store.publish(folder, f"s3://hanzo-models/base/{SHA}", "base")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def recipe(**changes: Any) -> Recipe:
    return Recipe.named("smollm2-135m-lora").changed({"base_model": {"uri": "file:///x", "sha256": SHA}} | changes)


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "instruction": f"What colour has door number {n}? " + "Look well. " * (n % 7),
            "answer": f"Door {n} is red.",
            "extra": n,
        }
        for n in range(count)
    ]


@pytest.mark.parametrize("system_prompt", [None, "You know every door."])
def test_small_dataset_is_counted_as_in_training(place: Place, system_prompt: str | None) -> None:
    place.store_tokenizer()
    version = place.version(rows(300))
    folder = place.store.fetch(version.artifact, place.folder)
    trained = encode_examples(make_tokenizer(), read_records(folder), system_prompt, 100_000)
    found = count_dataset_tokens(version, recipe(system_prompt=system_prompt), place.store)
    assert found.count == sum(len(example.tokens) for example in trained)
    assert found.source == "counted, with the base model's tokenizer"


TURNS = [{"role": "user", "content": "Which door?"}, {"role": "assistant", "content": "The red one."}]
LOOKS = {"type": "function", "function": {"name": "look", "description": "Looks at a door.", "parameters": {}}}
FORMS: list[dict[str, Any]] = [
    {"messages": [*TURNS, *TURNS]},
    {"messages": [{"role": "system", "content": "You know every door."}, *TURNS]},
    {"messages": TURNS, "tools": [LOOKS]},
    {"prompt": "Door one is", "completion": " red."},
    {"text": "Every door is red."},
]


@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
@pytest.mark.parametrize("record", FORMS)
def test_every_form_of_record_is_counted_as_in_training(
    place: Place, record: dict[str, Any], system_prompt: str | None
) -> None:
    """Regression: records were counted as unanswered conversations, as bytes including keys, quotes and roles."""
    place.store_tokenizer()
    version = place.version([record | {"id": number} for number in range(20)])
    trained = encode_examples(
        make_tokenizer(), read_records(place.store.fetch(version.artifact, place.folder)), system_prompt, 100_000
    )
    found = count_dataset_tokens(version, recipe(system_prompt=system_prompt), place.store)
    assert found.count == sum(len(example.tokens) for example in trained)
    assert found.source == "counted, with the base model's tokenizer"


def test_both_answers_of_a_pair_are_counted_with_their_prompt(place: Place) -> None:
    """A training step reads both, and the estimate divides by its tokens."""
    place.store_tokenizer()
    version = place.version([{"prompt": f"Door {n} is", "chosen": " red.", "rejected": " a blue cat."} for n in range(20)])
    wanted = recipe(objective="dpo")
    pairs = encode_pairs(make_tokenizer(), read_records(place.store.fetch(version.artifact, place.folder)), wanted)
    expected = sum(len(pair.chosen.tokens) + len(pair.rejected.tokens) for pair in pairs)
    found = count_dataset_tokens(version, wanted, place.store)
    assert (found.count, found.records) == (expected, 20)


def test_compressed_upload_is_assumed_by_its_uncompressed_size(place: Place) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows(3000)).encode()
    path = place.folder / "raw.jsonl.gz"
    path.write_bytes(gzip.compress(lines))
    version, _ = create_version(place.database, place.store, name="d", path=path, user="u", organization="default")
    held = sum(file.size for file in place.store.manifest(version.artifact).files)
    assert count_dataset_tokens(version, recipe(), place.store).count == held // 4 > version.size_bytes


def test_large_dataset_is_sampled_within_ten_percent(place: Place) -> None:
    """The records are sorted by length, so sampling only the beginning would be wrong."""
    place.store_tokenizer()
    many = [{"instruction": f"Door {n}? " + "Look well. " * (n // 40), "answer": f"{n}."} for n in range(4000)]
    version = place.version(many)
    assert version.size_bytes > 2 << 20
    found = count_dataset_tokens(version, recipe(), place.store)
    assert found.source.startswith("sampled: ") and "of 4000 records" in found.source
    trained = encode_examples(
        make_tokenizer(), read_records(place.store.fetch(version.artifact, place.folder)), None, 100_000
    )
    assert found.count == pytest.approx(sum(len(example.tokens) for example in trained), rel=0.1)


def test_count_without_a_tokenizer_is_assumed_from_bytes(place: Place) -> None:
    version = place.version(rows(10))
    found = count_dataset_tokens(version, recipe(), place.store)
    assert found.count == version.artifact.size_bytes // 4, "of its records, not of what was uploaded"
    assert found.source.startswith("assumed")
    unpinned = count_dataset_tokens(version, Recipe.named("zen-7b-lora"), place.store)
    assert unpinned == found


def test_template_that_fails_to_render_falls_back_to_the_assumption(place: Place) -> None:
    place.store_tokenizer()
    uri = f"s3://hanzo-models/base/{SHA}"
    config = json.loads(place.store.get_bytes(f"{uri}/tokenizer_config.json"))
    config["chat_template"] = "{{ messages.nothing.there.at.all }}"
    place.store.put_bytes(f"{uri}/tokenizer_config.json", json.dumps(config).encode())
    assert count_dataset_tokens(place.version(rows(10)), recipe(), place.store).source.startswith("assumed")


TURN = "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}%s{% endif %}"
OF_OTHERS = {
    "marks what is learned": "{% for message in messages %}" + TURN.replace("%s", "{{ message.content }}") + "{% endfor %}",
    "leaves a loop": "{% for message in messages %}\n  {{ message.content }}{% break %}\n  {% endfor %}",
    "writes json": "{{ messages | tojson }}",
    "is broken": "{% for message in messages %}",
}
"""Templates as in SmolLM3, Qwen and others: transformers supports more tags than jinja."""


@pytest.mark.parametrize("template", OF_OTHERS)
def test_template_extensions_of_transformers_are_supported(place: Place, template: str) -> None:
    """Regression: the estimate ended with an unexplained template syntax error."""
    place.store_tokenizer()
    place.store.put_bytes(f"s3://hanzo-models/base/{SHA}/chat_template.jinja", OF_OTHERS[template].encode())
    turns = [{"role": "user", "content": "Which <door>, é?"}, {"role": "assistant", "content": "The red one."}]
    found = count_dataset_tokens(
        place.version([{"messages": turns, "id": number} for number in range(5)]), recipe(), place.store
    )
    if template == "is broken":
        assert found.source.startswith("assumed")
        return
    tokenizer = make_tokenizer()
    tokenizer.chat_template = OF_OTHERS[template]
    assert found.source == "counted, with the base model's tokenizer"
    assert found.count == 5 * len(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False))


@pytest.mark.parametrize(("name", "source"), [("default", "counted, with the base model's tokenizer"), ("rag", "assumed")])
def test_default_of_several_templates_is_used(place: Place, name: str, source: str) -> None:
    """The tokenizers of Hermes and Command R have several."""
    place.store_tokenizer()
    uri = f"s3://hanzo-models/base/{SHA}"
    version = place.version(rows(10))
    expected = count_dataset_tokens(version, recipe(), place.store)
    config = json.loads(place.store.get_bytes(f"{uri}/tokenizer_config.json"))
    template = place.store.get_bytes(f"{uri}/chat_template.jinja").decode()
    several = [{"name": "tool_use", "template": "{{ tools }}"}, {"name": name, "template": template}]
    place.store.put_bytes(f"{uri}/tokenizer_config.json", json.dumps(config | {"chat_template": several}).encode())
    place.store.delete(f"{uri}/chat_template.jinja")
    found = count_dataset_tokens(version, recipe(), place.store)
    assert found.source.startswith(source)
    assert (found == expected) == (name == "default")
