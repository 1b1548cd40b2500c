"""What is known of an operator: what it writes, whether the host needs its result, what it is made of, who calls it."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

TORCH = str(Path(torch.__file__).parent)
LIBRARY = sysconfig.get_path("stdlib")

SYNCS = (
    "aten._pack_padded_sequence",
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.equal",
    "aten.is_nonzero",
)
"""Operators whose result the host needs: a graph cannot contain them."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operator (lists one level deep, as schemas have them)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem")
"""Namespaces of operators between ranks."""

STATISTICS = ("running_mean", "running_var")
"""Arguments that batch and instance norms write in training, unsaid by their schemas."""

TRAINING = ("training", "train", "use_input_stats")
"""The arguments that say whether they do."""


def writes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes."""
    learning = False
    if func.namespace == "c10d":
        # Collectives write their first argument, unsaid by their schemas.
        yield from tensors_in(args[:1])
    for position, argument in enumerate(func._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared:
            yield from tensors_in(_given(position, argument.name, args, kwargs))
        elif argument.name in TRAINING:
            learning = bool(_given(position, argument.name, args, kwargs))
    if learning:
        for position, argument in enumerate(func._schema.arguments):
            if argument.name in STATISTICS:
                yield from tensors_in(_given(position, argument.name, args, kwargs))


def _given(position: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


CROSSINGS = ("aten::copy_", "aten::copy", "aten::_copy_from", "aten::_copy_from_and_resize")
"""Operators that copy into a tensor of another device."""


ATTENTION = (
    "aten::_scaled_dot_product_",
    "aten::_efficient_attention_forward",
    "aten::_flash_attention_forward",
    "aten::_cudnn_attention_forward",
)
"""Beginnings of the names of fused attention kernels."""


def lasting(func: Any, result: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result, without the random seed and offset of fused attention.

    Memory-efficient attention hands those back as numbers of the host, and inside a capture as tensors of the device.
    """
    seeded = func.name().startswith(ATTENTION)
    return (t for t in tensors_in(result) if not (seeded and t.dim() == 0 and t.device.type == "cpu"))


def needs_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> bool:
    """Whether an operator's result or its shape depends on data, which the host would have to read."""
    name = func.name().split(".")[0]
    if name.replace("::", ".") in SYNCS:
        return True
    if name == "aten::one_hot":
        # With the number of classes the shape is known; on a CPU the range is checked all the same.
        return device == "cpu" or _given(1, "num_classes", args, kwargs) in (None, -1)
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    if torch.Tag.dynamic_output_shape in func.tags:
        indices = [t for t in tensors_in(args[1:]) if t.dtype in (torch.bool, torch.uint8)]
        return not str(func).startswith("aten.index.") or bool(indices)
    return torch.Tag.data_dependent_output in func.tags


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers: attention and dropout do not with p=0 or outside training."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout", "train", "training"):
            given = position < len(args) or argument.name in kwargs
            value = _given(position, argument.name, args, kwargs) if given else argument.default_value
            if value is not None and not value:
                return False
    return True


def composed(func: Any, device: str) -> bool:
    """Whether an operator is made of others, and the device has none of its own for it.

    In inference mode these reach a mode whole: what they read, write and ask of the host would stay unseen.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), device.upper())


def in_compiled_code() -> bool:
    """Whether the operator at hand is called by code that inductor wrote."""
    frame = sys._getframe(1)
    for _ in range(24):
        file = frame.f_code.co_filename
        if "torchinductor" in file or (file.startswith(TORCH) and "_inductor" in file):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def caller() -> str:
    """File and line of the innermost code that is neither torch's nor ours."""
    passed = (str(Path(__file__).parent), TORCH, "<")
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(passed) and not in_library(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return "no line of the forward is known"


def in_library(file: str) -> bool:
    """Whether a file belongs to Python's own library."""
    return file.startswith(LIBRARY) and "site-packages" not in file and "dist-packages" not in file
