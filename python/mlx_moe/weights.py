"""The weights of a linear layer as they are at this moment, and the kernels' view of them."""

import copyreg
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import mlx.core as mx

from . import core
from .errors import InvalidArgument

FLOATS = frozenset({mx.float32, mx.float16, mx.bfloat16})
KEYS = ("weight", "scales", "biases", "bias")
PLAIN_KEYS = frozenset({*KEYS, "global_scale"})
MODES = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # MLX's defaults


def promote(*dtypes: mx.Dtype) -> mx.Dtype:
    """MLX's common type of f32, f16 and bf16 dtypes."""
    return dtypes[0] if len(set(dtypes)) == 1 else mx.float32


class UnknownFormat(Exception):
    """The kernels do not read this weight format."""


class Linear:
    """The arrays and the format of one (stacked) linear module, read at a call.

    Nothing is kept between calls: an array can change under the same Python object
    (`layer.bias /= 2`), so that identity would not show it, and reading costs a microsecond.

    Attributes:
        module: the module that was read.
        name: its path, for errors.
        names, arrays: its floating-point arrays, which gradients can reach.
        fixed: its other arrays (packed weights, uint8 scales, global scales) by name.
    """

    __slots__ = ("arrays", "fixed", "module", "name", "names")

    def __init__(self, module: Any, name: str):
        self.module, self.name = module, name
        self.names: list[str] = []
        self.arrays: list[mx.array] = []
        self.fixed: dict[str, mx.array] = {}
        for name in KEYS:
            array = module.get(name)
            if array is None:
                continue
            if array.dtype in FLOATS:
                self.names.append(name)
                self.arrays.append(array)
            else:
                self.fixed[name] = array
        if (global_scale := module.get("global_scale")) is not None:
            self.fixed["global_scale"] = global_scale

    @property
    def rows(self) -> int:
        """Output features."""
        return int(self.module["weight"].shape[-2])

    def out_dtype(self, x: mx.Dtype) -> mx.Dtype:
        """The dtype of stock's result for an input of dtype `x`."""
        return promote(x, *[a.dtype for a in self.arrays])

    def matrix(self, arrays: Sequence[mx.array], packed: core.Packed | None = None) -> core.Matrix:
        """The kernels' handle; `arrays` stand for `self.arrays` and must be evaluated.

        packed: copies that the kernels use if they were made from these very arrays.
        """
        given: dict[str, Any] = dict(zip(self.names, arrays, strict=True), **self.fixed)
        module = self.module
        if "scales" in given:
            given["mode"], given["bits"], given["group_size"] = quantisation(module)
        try:
            return core.Matrix(**given, packed=packed)
        except (InvalidArgument, TypeError) as error:
            raise UnknownFormat(f"{self.name}: {error}") from error

    def twin(self, arrays: Sequence[mx.array]) -> Any:
        """A shallow copy of the module that holds `arrays` in place of `self.arrays`."""
        other = shallow_copy(self.module, own_class(self.module))
        dict.update(other, zip(self.names, arrays, strict=True))
        return other


def shallow_copy(module: Any, cls: Any) -> Any:
    """A copy of an MLX module, as class `cls`, that shares its children and arrays."""
    other = cls.__new__(cls)
    other.__dict__.update(module.__dict__)
    dict.update(other, module)
    return other


def subclass(base: type, **body: Any) -> type:
    """A subclass of a module's class that shows as `base` itself; `own_class` tells them apart.

    Make each once (`functools.cache`): modules are compared by their class.
    """
    body = {"__module__": base.__module__, "_moe_base": base, **body}
    return cast(type, _not_pickled(type(base))(base.__name__, (base,), body))


@cache
def _not_pickled(kind: type) -> Any:
    """The type of such subclasses: pickling would look for them where `base` is, and name
    neither the cause nor a way out."""
    made = type(kind.__name__, (kind,), {})
    copyreg.pickle(made, _refuse_pickling)  # asked for classes before they are looked up
    return made


def _refuse_pickling(cls: Any) -> Any:
    raise InvalidArgument(
        f"a replaced {cls.__name__} cannot be pickled: first call restore_moe_layers and "
        "restore_linear_layers on the model, or save its weights as mlx-lm does"
    )


def own_class(module: Any) -> type:
    """The module's class without our replacement."""
    return getattr(type(module), "_moe_base", type(module))


def describe(module: Any) -> tuple[str, int | None]:
    """The dtype of a linear module's values ("bfloat16") and its bits, None if not quantised."""
    module = module.get("linear", module)  # adapters wrap their base layer
    if "scales" not in module:
        return str(module["weight"].dtype).removeprefix("mlx.core."), None
    mode, bits, _ = quantisation(module)
    values = str(module["scales"].dtype).removeprefix("mlx.core.")
    return (values if mode == "affine" else mode), bits


class Quantisation(NamedTuple):
    """As MLX's operations take it by keyword (`_asdict`)."""

    mode: str
    bits: int
    group_size: int


def quantisation(module: Any) -> Quantisation:
    """That of a quantised linear module.

    `nn.quantize` without them leaves None in mlx-lm's stacked layers, which MLX's operations take
    for the default of the mode.
    """
    mode = getattr(module, "mode", "affine")
    bits, group_size = MODES.get(mode, (0, 0))
    return Quantisation(mode, int(module.bits or bits), int(module.group_size or group_size))


def columns(module: Any) -> int:
    """Input features of a linear module, quantised or not."""
    if (scales := module.get("scales")) is None:
        return int(module["weight"].shape[-1])
    return int(scales.shape[-1] * quantisation(module).group_size)
