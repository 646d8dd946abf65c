"""Any number of processes reads row shards that others wrote.

`test_two_processes` covers training on from them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from recipes.checkpoints.node_parts import shard_rows
from recipes.training.checkpointing.sharded_safetensors import RowRange, ShardedTensors, write_rows
from recipes.training.checkpointing.staging import Staging
from recipes.training.parallel.process_group import ProcessGroup
from tests.support.server_process import free_port

ROOT = Path(__file__).resolve().parents[4]
MEGABYTES_OF_BUFFER = 100
SAVING = """
import sys
from pathlib import Path
import torch
from torch.distributed.fsdp import fully_shard
from recipes.contracts.job import Distributed
from recipes.training.parallel.process_group import join_process_group
from recipes.training.parallel.fsdp import load_optimizer, load_weights, local_tensor, save_optimizer, save_weights
from recipes.training.checkpointing.staging import Staging
from recipes.training.parallel.fsdp import optimizer_states, named_weights

NODES, PER_NODE = int(sys.argv[2]), int(sys.argv[3])
MEGABYTE = 1 << 20

def new():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2049, 2049, bias=False) for _ in range(12)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

def resident(key):
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith(key))

group = join_process_group(Distributed(strategy="fsdp", num_nodes=NODES, gpus_per_node=PER_NODE, backend="gloo"))
folder = Path(sys.argv[1], str(group.node))
folder.mkdir(parents=True, exist_ok=True)
model, optimizer = new()
model(torch.randn(4, 2049)).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
with torch.no_grad():
    model(torch.randn(4, 2049))
held = sum(local_tensor(weight).nbytes for weight in named_weights(model).values()) // MEGABYTE
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
nowhere = Staging(free=lambda: 0)  # nothing is copied
save_weights(model, folder, group, nowhere)
save_optimizer(model, optimizer, folder, group, nowhere)
nowhere.begin().result()
print(f"rank {group.rank} holds {held} MB of weights, saving took {resident('VmHWM') - before} MB", flush=True)
group.all_gather(None)
own_files = {f"{stem}-rows-{rank + 1:05}-of-{group.size:05}.safetensors"
    for stem in ("model", "optimizer") for rank in range(group.node * PER_NODE, (group.node + 1) * PER_NODE)}
assert {file.name for file in folder.iterdir()} == own_files, "those that the processes of this node wrote"
group.all_gather(None)
whole = Path(sys.argv[1], "0")
if group.is_leader:
    for file in Path(sys.argv[1]).glob("[1-9]/*"):
        file.rename(whole / file.name)
group.all_gather(None)
again, theirs = new()
load_weights(again, whole)
load_optimizer(again, theirs, whole)
for name, weight in named_weights(model).items():
    assert local_tensor(weight).equal(local_tensor(named_weights(again)[name])), name
for name, state in optimizer_states(model, optimizer).items():
    for key, value in state.items():
        assert local_tensor(value).equal(local_tensor(optimizer_states(again, theirs)[name][key])), (name, key)
print(f"rank {group.rank} reads them", flush=True)
"""


@given(total=st.integers(0, 9), writers=st.integers(1, 4), readers=st.integers(1, 5))
def test_shards_are_read_by_any_number_of_processes(total: int, writers: int, readers: int) -> None:
    whole = torch.arange(2.0 * total).view(total, 2)
    with TemporaryDirectory() as folder:
        written = [Path(folder, f"rows-{rank}.safetensors") for rank in range(writers)]
        for rank, file in enumerate(written):
            part = shard_rows(total, rank, writers)
            one = {"step": torch.tensor(7.0)} if rank == 0 else {}
            save_file({"weight": whole[part.start : part.stop].clone(), **one}, file)
        files = ShardedTensors(written)
        assert sorted(files.names) == ["step", "weight"]
        assert (files.shape("weight"), files.shape("step"), files.shape("bias")) == (whole.shape, torch.Size([]), None)
        parts = [files.read("weight", shard_rows(total, rank, readers)) for rank in range(readers)]
        assert torch.cat(parts).equal(whole) and files.read("weight").equal(whole)
        assert files.read("step") == 7.0


def test_rows_are_ordered_by_file_metadata(tmp_path: Path) -> None:
    """With weights sharded along two dimensions, the second process does not hold the next rows."""
    whole = torch.arange(8.0).view(4, 2)
    for process, first in enumerate((0, 2, 1, 3)):
        group = ProcessGroup(process, size=1, local_rank=process)
        staging = Staging()
        row, place = {"weight": whole[first : first + 1]}, {"weight": RowRange(first, 4)}
        write_rows(row, f"of-{process}", tmp_path, group, staging, place)
        staging.begin()
        staging.settle()
    files = ShardedTensors(sorted(tmp_path.glob("*")))
    assert files.read("weight").equal(whole) and files.read("weight", range(1, 3)).equal(whole[1:3])
    assert torch.cat(list(files.iter_pieces("weight"))).equal(whole)


def test_shards_of_an_earlier_release_are_read(tmp_path: Path) -> None:
    whole = torch.arange(8.0).view(4, 2)
    for process, first in enumerate((2, 0)):
        save_file({"weight": whole[first : first + 2]}, tmp_path / str(process), {"first_rows": f'{{"weight": {first}}}'})
    assert ShardedTensors(sorted(tmp_path.glob("*"))).read("weight").equal(whole)


def test_shard_rows_equal_torch_chunks() -> None:
    for total in range(12):
        for processes in range(1, 6):
            chunks = torch.arange(total).chunk(processes) if total else ()
            own = [shard_rows(total, rank, processes) for rank in range(processes)]
            assert [list(rows) for rows in own if rows] == [chunk.tolist() for chunk in chunks]


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "on_each"), [(1, 2), (2, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_saving_takes_no_more_memory_than_a_buffer(tmp_path: Path, nodes: int, on_each: int) -> None:
    """200 MB of weights and 400 MB of moments are sharded.

    Processes of two nodes share no folder.
    """
    (tmp_path / "saving.py").write_text(SAVING)
    port = free_port()
    launched = []
    for node in range(nodes):
        words = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={on_each}"]
        words += ["--master-addr=127.0.0.1", f"--master-port={port}", str(tmp_path / "saving.py")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words, str(tmp_path / "saved"), str(nodes), str(on_each)]
        launched.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = "".join(process.communicate(timeout=240)[0] for process in launched)
    assert [process.returncode for process in launched] == [0] * nodes, said
    found = re.findall(r"rank \d holds (\d+) MB of weights, saving took (-?\d+) MB", said)
    processes = nodes * on_each
    assert [round(int(own) * processes / 192, 1) for own, _ in found] == [1.0] * processes, said
    assert all(int(more) < MEGABYTES_OF_BUFFER for _, more in found), said
    assert said.count("reads them") == processes
