from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from sfactory.runs.tensor_file import unpack_tensors

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
)  # fmt: skip


def test_it_reads_what_the_library_writes():
    generator = torch.Generator().manual_seed(3)
    shapes = [(), (0, 3), (1,), (5, 7), (2, 3, 4)]
    tensors = {
        f"{dtype} {shape}": (100 * torch.randn(shape, generator=generator)).to(dtype)
        for dtype in DTYPES
        for shape in shapes
    }
    found = unpack_tensors(safetensors.torch.save(tensors, metadata={"format": "pt"}))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def file(header: object, numbers: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def tensor(**changed: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changed}


def test_tensors_are_writable_and_apart():
    data = file(tensor() | {"y": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})
    found = unpack_tensors(data)
    found["x"].fill_(1.0)
    assert not found["y"].any()
    assert not unpack_tensors(data)["x"].any()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        file(b"{"),
        file([1, 2]),
        file({"x": 5}),
        file({"x": {"dtype": "F32"}}),
        file(tensor(dtype="F31")),
        file(tensor(shape=[5])),
        file(tensor(shape=[-4])),
        file(tensor(shape="four")),
        file(tensor(data_offsets=[0, 20], shape=[5])),
        file(tensor(data_offsets=[-4, 12])),
        file(tensor(data_offsets=[16, 0])),
        file(tensor(data_offsets=[0])),
        file(tensor(more=1)),
    ],
)
def test_what_is_no_such_file_is_refused(data):
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        unpack_tensors(data)
