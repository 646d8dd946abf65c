"""Training state in safetensors and JSON.

It is restored bit for bit without a pickle; files of earlier releases are still read.
"""

import io
import math
import pickle
import pickletools
import random
import shutil
import zipfile
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import pytest
import torch
from safetensors import safe_open

from recipes.checkpoints.commit import find_corruption
from recipes.contracts.results import TrainingFacts
from recipes.storage.artifact_store import MANIFEST_FILE, describe_files
from recipes.storage.manifest import Manifest
from recipes.training.checkpointing.state_files import find_state_file, read_state, write_state
from tests.recipes.training.forked_processes import Forks
from tests.recipes.training.parallel_strategies import shape
from tests.recipes.training.training_workspace import Place

FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}
QLORA = {"method": "qlora", "base_dtype": "nf4", "compute_dtype": "float32", "double_quant": True}
SHORT = {"max_steps": 2, "eval_steps": None}


def assert_same(found: Any, expected: Any) -> None:
    """Assert equality of type and of every bit, including NaNs and signs of zeros."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.flatten().view(torch.uint8).equal(expected.flatten().view(torch.uint8))
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same([*found.items()], [*expected.items()])
    else:
        assert repr(found) == repr(expected)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
STATES: dict[str, Any] = {
    "floats": [0.1 + 0.2, -0.0, 5e-324, math.pi * 1e300, math.inf, -math.inf, math.nan, 1.0, 1],
    "integers": [0, -1, 2**31, 2**63, -(2**64), 10**40, True],
    "keys": {0: "number", "0": "text", (1, "a"): None, "$tensor": "not a tensor", "ümlaut": "\x00\n", "/": {}},
    "sequences": {"tuple": (1, (2.5, [])), "list": [(), {}], "empty": ""},
    "arrays": {"numpy": np.array([0, 1, 2**32 - 1], dtype=np.uint32), "rows": np.eye(2)},
    "tensors": {
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0),
        "odd": torch.arange(7, dtype=torch.uint8),
        "nan": torch.tensor([math.nan]),
        "types": [torch.tensor([-1.5, 0.0, 3.25]).to(dtype) for dtype in DTYPES],
    },
    "random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
}


@pytest.mark.parametrize("kind", STATES)
def test_state_is_read_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    write_state(STATES[kind], tmp_path / "state.safetensors")
    assert_same(read_state(tmp_path / "state.safetensors"), STATES[kind])
    with safe_open(tmp_path / "state.safetensors", framework="pt") as opened:  # as transformers expects
        assert opened.metadata()["format"] == "pt"


def test_state_without_tensors_is_a_json_file(tmp_path: Path) -> None:
    write_state(STATES["floats"], tmp_path / "state.json")
    assert_same(read_state(tmp_path / "state.json"), STATES["floats"])
    with pytest.raises(TypeError, match=r"state\.json cannot hold tensors: scalar, none, odd"):
        write_state(STATES["tensors"], tmp_path / "state.json")


def test_equal_states_write_equal_files_with_shared_tensors_once(tmp_path: Path) -> None:
    """bitsandbytes shares one table of the 8-bit quantization values among all weights."""
    table = torch.randn(1000)
    for name in ("one.safetensors", "two.safetensors"):
        write_state({"b": {"map": table.clone()}, "a": [table, table, table[:10]]}, tmp_path / name)
    one, two = (tmp_path / f"{name}.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_size < 2 * table.nbytes + 10 * 4 + 1000
    found = read_state(one)
    assert found["a"][0] is found["a"][1] and found["a"][0].equal(found["b"]["map"])


def test_loaded_state_outlives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    write_state({"moments": torch.ones(100_000)}, file)
    found = read_state(file)["moments"]
    assert str(file) not in Path("/proc/self/maps").read_text()
    file.write_bytes(b"")
    assert found.equal(torch.ones(100_000))


@pytest.mark.parametrize(
    "value", [Fraction(1, 3), {1, 2}, b"bytes", np.float32(1), object()], ids=lambda value: type(value).__name__
)
def test_non_plain_data_is_refused_with_its_path(value: Any, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=rf"groups/1/odd is a {type(value).__name__}: a checkpoint can hold tensors and plain"
    ):
        write_state({"groups": [{}, {"odd": value}]}, tmp_path / "state.safetensors")
    assert not (tmp_path / "state.safetensors").exists()


@pytest.mark.requirement("I2")
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "AdamW32bit"])
def test_optimizer_state_round_trip_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(128, 128)
        make_optimizer = getattr(torch.optim if name == "AdamW" else bitsandbytes.optim, name)
        return model, make_optimizer([{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}], lr=0.1)

    def step(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        model.zero_grad()
        model(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()

    model, optimizer = make()
    for seed in (1, 2):
        step(model, optimizer, seed)
    write_state(optimizer.state_dict(), tmp_path / "optimizer.safetensors")
    assert_same(read_state(tmp_path / "optimizer.safetensors"), optimizer.state_dict())
    again, restored = make()
    again.load_state_dict(model.state_dict())
    restored.load_state_dict(read_state(tmp_path / "optimizer.safetensors"))
    for seed in (3, 4):
        step(model, optimizer, seed)
        step(again, restored, seed)
    assert model.weight.equal(again.weight) and model.bias.equal(again.bias)


# No file of a new checkpoint is a pickle.


def is_pickle(content: bytes) -> bool:
    """Return whether any loader would unpickle this: a PyTorch archive, or a leading pickle."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        return any(name.endswith(".pkl") for name in zipfile.ZipFile(io.BytesIO(content)).namelist())
    if content[:1] == pickle.PROTO and content[1] <= pickle.HIGHEST_PROTOCOL:
        return True
    try:  # protocols 0 and 1 have no magic byte
        *_, (_, _, end) = pickletools.genops(content)
    except ValueError:
        return False
    return end == len(content) - 1


def pickles_in(folder: Path) -> list[str]:
    return sorted(
        str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and is_pickle(file.read_bytes())
    )


@pytest.mark.parametrize("state", [{"a": (1, 2.5)}, OrderedDict(weights=torch.ones(3))], ids=["plain", "tensors"])
def test_every_form_of_pickle_is_recognized(state: Any) -> None:
    for new_form in (True, False):
        torch.save(state, written := io.BytesIO(), _use_new_zipfile_serialization=new_form)
        assert is_pickle(written.getvalue())
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert is_pickle(pickle.dumps(state, protocol))


@pytest.mark.requirement("X8", "Z30")
@pytest.mark.parametrize(
    "settings",
    [{}, QLORA, FULL, FULL | {"optimizer": "adamw_8bit"}, FULL | {"distributed": shape("fsdp", 1)}],
    ids=["lora", "qlora", "full", "eight-bits", "sharded"],
)
def test_no_file_of_a_checkpoint_is_a_pickle(
    place: Place, tmp_path: Path, request: pytest.FixtureRequest, settings: dict[str, Any]
) -> None:
    work = tmp_path / f"no-pickle-{request.node.callspec.id}"
    place.train(work, **SHORT | settings)
    folder = work / "checkpoints" / "2"
    assert pickles_in(folder) == []
    states = {file.name for file in folder.iterdir() if file.name.startswith(("optimizer", "scheduler", "rng", "training_"))}
    rows = "-rows-00001-of-00001" if "distributed" in settings else ""
    assert states == {f"optimizer{rows}.safetensors", "scheduler.json", "rng_state.safetensors", "training_args.json"}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3", "pipeline"])
def test_no_file_that_several_processes_save_is_a_pickle(
    place: Place, started: Forks, tmp_path: Path, strategy: str
) -> None:
    work = tmp_path / f"no-pickle-{strategy}"
    batch = {"batch_size": 4 if strategy == "pipeline" else 2}
    settings = {**FULL, **SHORT, **batch, "distributed": shape(strategy, 2)}
    job = place.job(work, settings)
    started.train(job.model_copy(update={"distributed": place.recipe.changed(settings).distributed}))
    folder = work / "checkpoints" / "2"
    assert pickles_in(folder) == []
    assert {"rng_state_0.safetensors", "rng_state_1.safetensors", "scheduler.json"} <= {
        file.name for file in folder.iterdir()
    }


# Checkpoints of earlier releases.


def make_old(folder: Path) -> None:
    """Write a checkpoint as earlier releases did: the same states, pickled, with transformers' file names."""
    for old_name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        new_file = find_state_file(folder, Path(old_name).stem)
        torch.save(read_state(new_file), folder / old_name)
        new_file.unlink()
    (folder / "training_args.json").unlink()
    torch.save({"learning_rate": 1}, folder / "training_args.bin")
    manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    (folder / MANIFEST_FILE).unlink()
    (folder / MANIFEST_FILE).write_bytes(manifest.model_copy(update={"files": describe_files(folder)}).to_bytes())


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, FULL | {"optimizer": "adamw_8bit"}], ids=["lora", "eight-bits"])
def test_checkpoint_of_an_earlier_release_resumes_bit_for_bit(
    place: Place, tmp_path: Path, request: pytest.FixtureRequest, settings: dict[str, Any]
) -> None:
    """Dropout uses the restored random states; a lost optimizer moment would change the weights."""
    work = tmp_path / f"old-{request.node.callspec.id}"
    settings = settings | {"max_steps": 6, "eval_steps": None, "lr_scheduler": "cosine"}
    whole = place.train(work, **settings)
    place.checkpoints(work).discard_from(4)
    folder = work / "checkpoints" / "2"
    make_old(folder)
    assert find_corruption(folder, 2) is None
    assert pickles_in(folder) == ["optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin"]
    again = place.train(work, **settings)
    found = TrainingFacts.model_validate(again.facts)
    assert found.resumed_from == 2
    assert found.losses == TrainingFacts.model_validate(whole.facts).losses
    assert again.artifacts == whole.artifacts
    assert pickles_in(work / "checkpoints" / "4") == []


def test_missing_state_of_another_strategy_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no file optimizer\.\*: it was saved by another distributed strategy"):
        find_state_file(tmp_path, "optimizer")
    shutil.copyfile(__file__, tmp_path / "rng_state_1.pth")
    assert find_state_file(tmp_path, "rng_state_1").name == "rng_state_1.pth"
