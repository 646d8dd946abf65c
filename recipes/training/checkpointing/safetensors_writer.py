"""Write a safetensors file piece by piece, without a second copy of its tensors."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
HEADER_ALIGNMENT_BYTES = 8


def write_safetensors(
    file: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    pieces: Callable[[str], Iterable[torch.Tensor]] | None = None,
) -> None:
    """Write a safetensors file tensor by tensor.

    Unlike the library's `save_file` it copies GPU tensors to the host one at a time, and sorts the metadata, so that equal
    states produce equal files.

    Args:
        pieces: yields a tensor in pieces; needed if `tensors` have no data (the meta device).
    """
    # Largest element size first, as the library does: a reader needs each tensor aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        shape, dtype = list(tensors[name].shape), SAFETENSORS_DTYPES[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header_bytes += b" " * (-len(header_bytes) % HEADER_ALIGNMENT_BYTES)
    with file.open("wb") as target:
        target.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for name in names:
            for piece in pieces(name) if pieces else (tensors[name],):
                target.write(tensor_bytes(piece.to(tensors[name].dtype)))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
