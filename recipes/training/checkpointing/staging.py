"""Copy training state to free host memory and write it in the background."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

MEMINFO = Path("/proc/meminfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
"""Lines such as `4:memory:/slurm/uid_0/job_7/step_0` (cgroup v1) and `0::/system.slice/slurm/job_7/step_0` (v2)."""
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("", "memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""For cgroup v2 and v1: controller name (in a process's lines and as a folder), limit file, usage file, and the fields of
memory.stat that count page cache, which the kernel reclaims before it kills a process.
"""


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN_CGROUPS) -> int:
    """Return how many bytes can be allocated before the kernel kills a process.

    The minimum of the machine's available memory and that of each cgroup that contains this process: Slurm limits a step in
    one, and may limit its job in an outer one.
    """
    free = read_field(meminfo, "MemAvailable:") * 1024
    for version, limit, used, cached in CGROUP_FILES:
        for group in enclosing_cgroups(cgroup / version, cgroup_path(own, version)):
            if (group / limit).is_file() and (most := (group / limit).read_text(encoding="utf-8").strip()).isdigit():
                files = sum(read_field(group / "memory.stat", name) for name in cached)
                free = min(free, max(0, int(most) - int((group / used).read_text(encoding="utf-8")) + files))
    return free


def cgroup_path(own: Path, controller: str) -> str:
    """Return the path of this process's cgroup below the root.

    "/" if it is in none or unknown.
    """
    lines = (line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()) if own.is_file() else ()
    return next((path for _, controllers, path in lines if controller in controllers.split(",")), "/")


def enclosing_cgroups(root: Path, path: str) -> Iterator[Path]:
    """Yield the cgroup at `path` and its parents up to `root`.

    A container sees its own cgroup as the root: a host path does not exist there, nor one that leads outside, such as
    `/../x`.
    """
    inner = root if ".." in path.split("/") else root / path.lstrip("/")
    yield from (inner, *inner.parents[: len(inner.relative_to(root).parts)])


def read_field(file: Path, name: str) -> int:
    """Return the number after `name` at the start of a line.

    0 if there is none.
    """
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return next((int(words[1]) for words in lines if words and words[0] == name), 0)


T = TypeVar("T")
Action = Callable[[], object]

MAX_PINNED_BYTES = 4 << 30
"""Maximum size of a state whose copies use pinned memory, to which a GPU copies at full speed. PyTorch rounds pinned
allocations up to a power of two, so that all weights of a large model would take up to twice their size.
"""
FREE_MEMORY_FACTOR = 2
"""Free memory required, as a multiple of the copies' size: other consumers, such as data loading, need some too."""


class Staging:
    """Buffers and background writer for the checkpoints of one process.

    Each checkpoint reuses the previous one's buffers.

    Args:
        processes: how many processes of this machine stage at the same time.
        free: returns the machine's free memory in bytes.
        any_process: a collective that returns whether a flag is true in any process of the run.
    """

    def __init__(
        self, processes: int = 1, free: Callable[[], int] = free_memory, any_process: Callable[[bool], bool] = bool
    ) -> None:
        self._processes = processes
        self._free = free
        self._any_process = any_process
        self._lacks_memory = False
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._num_staged = 0
        self._actions: list[Action] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-write")
        self._written: Future[None] | None = None

    def stage(self, state: T, write: Callable[[T], object]) -> None:
        """Schedule `write` with a copy of `state`, so that training can continue.

        `state` consists of tensors in dicts and lists.

        If there is no memory for the copy, `write` gets `state` itself during `begin`.
        """
        # Tensors that share memory, such as tied weights, share it in the copy too.
        distinct = {memory_key(tensor): tensor for tensor in tree_leaves(state) if isinstance(tensor, torch.Tensor)}
        room = self._allocate_buffers(list(distinct.values()))
        if room is None:
            self._lacks_memory = True
            self.add_action(lambda: write(state))
            return
        copies = dict(zip(distinct, room, strict=True))
        copy_all(distinct.values(), room)
        copy = tree_map_only(torch.Tensor, lambda tensor: copies[memory_key(tensor)], state)
        self.add_action(lambda: write(copy))

    def add_action(self, action: Action) -> None:
        """Schedule an action after everything that was staged before."""
        self._actions.append(action)

    def begin(self) -> Future[None]:
        """Start writing what was staged; the future ends when everything is written or something failed.

        If any process lacks memory for copies, all processes wait for the writes, and errors are raised: writing includes
        communication between processes, and a process that wrote synchronously while others did not caused a deadlock.
        """
        waits, self._lacks_memory = self._any_process(self._lacks_memory), False
        begun = self._written = self._writer.submit(run_actions, self._pop_actions())
        if waits:
            self.settle()
        return begun

    def settle(self) -> None:
        """Wait until everything is written, so that buffers can be reused. Raises a failure once."""
        self._actions, self._num_staged, self._lacks_memory = [], 0, False
        written, self._written = self._written, None
        if written:
            written.result()

    def raise_if_failed(self) -> None:
        """Raise a failed write now: the next checkpoint may be an hour away."""
        if self._written and self._written.done():
            self.settle()

    def close(self) -> None:
        """Wait for the last checkpoint and free the buffers for what follows training."""
        try:
            self.settle()
        finally:
            self._buffers.clear()

    def _pop_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _allocate_buffers(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the buffers of the corresponding state of the last checkpoint, or new ones.

        None if memory is short.
        """
        place, self._num_staged = self._num_staged, self._num_staged + 1
        room = self._buffers.get(place, [])
        if [shape_and_dtype(tensor) for tensor in room] == [shape_and_dtype(tensor) for tensor in tensors]:
            return room
        size = sum(tensor.nbytes for tensor in tensors)
        if size * self._processes * FREE_MEMORY_FACTOR > self._free():
            return None
        try:
            self._buffers[place] = [
                torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda and size <= MAX_PINNED_BYTES)
                for tensor in tensors
            ]
        # the error type varies in torch; not an out-of-memory of the step, so the batch must not shrink
        except (RuntimeError, MemoryError):
            return None
        return self._buffers[place]


@torch.no_grad()
def copy_all(tensors: Iterable[torch.Tensor], room: Iterable[torch.Tensor]) -> None:
    """Copy with one thread, which moves several GB/s.

    More threads wait for each other where the CPU is busy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for tensor, place in zip(tensors, room, strict=True):
            place.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        torch.set_num_threads(threads)


def memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Key that is equal for tensors that are the same view of the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def shape_and_dtype(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype


def run_actions(actions: Iterable[Action]) -> None:
    for action in actions:
        action()
