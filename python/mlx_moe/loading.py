"""Load a model with mlx-lm and replace its layers."""

import inspect
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils

from . import attention
from .dense import replace_linear_layers
from .distributed_replace import check_alone
from .errors import CorruptFile, InvalidArgument, ModelNotFound, MoEError, NoMoELayers
from .expert_memory import ExpertMemory
from .following import follow
from .replace import replace_moe_layers, resolve_backend
from .replacement import Replacement
from .static import EXECUTORS, Importance, Overflow
from .store_files import Checkpoint

log = logging.getLogger("mlx_moe")


@dataclass
class Replaced:
    """A model and what was replaced in it; None where nothing was.

    Attributes:
        plan: further arguments of `replace_moe_layers`: plan, artifacts, expert_memory, ...; and
            rebalance, whether to `follow` the plan.
    """

    model: nn.Module
    backend: str
    moe: Replacement | None = None
    dense: Replacement | None = None
    plan: dict[str, Any] = field(default_factory=dict)

    def replace(self) -> "Replaced":
        """Replace the MoE layers, and on a CPU-only MLX the dense ones too."""
        try:
            plan = dict(self.plan)
            rebalance = plan.pop("rebalance", False)
            self.moe = replace_moe_layers(self.model, backend=self.backend, **plan)
        except NoMoELayers:
            if self.plan.get("plan") is not None:
                raise
            self.moe = None
        try:
            if rebalance and self.moe is not None:
                follow(self.moe, plan["plan"])
            self.dense = replace_dense(self.model, self.backend)
        except BaseException:
            self.restore()
            raise
        return self

    def restore(self) -> None:
        """Put the stock layers back."""
        for replacement in (self.dense, self.moe):
            if replacement is not None:
                replacement.restore()
        self.moe = self.dense = None

    def read(self) -> None:
        """Read what is not read yet of a lazily loaded model, from the same files as its store."""
        mx.eval(self.model.parameters())
        if self.moe is not None and self.moe.store is not None:
            self.moe.store.check_files()

    def __str__(self) -> str:
        name = type(self.model).__module__.rpartition(".")[2]
        moe = "no MoE layers"
        if self.moe:
            layers = [layer for layer in self.moe.layers if layer.kind == "experts"]
            replaced = any(layer.backend != "stock" for layer in layers)
            moe = f"{len(layers)} MoE layers {'replaced' if replaced else 'left to stock'}"
            if static := [layer for layer in self.moe.layers if layer.backend in EXECUTORS]:
                moe += f", {len(static)} with a static path"
            if self.plan.get("group") is not None:
                moe += f" ({self.moe.note})"
        names = [layer.name for layer in self.dense.layers] if self.dense else []
        count = len([name for name in names if name != attention.NAME])
        dense = f", {count} dense layers replaced" if count else ""
        note = f"; {self.moe.note}" if self.moe is not None and self.moe.store is not None else ""
        return f"{name}: {moe}{dense}{note}"


def replace_layers(model: nn.Module, backend: str, plan: dict[str, Any] | None = None) -> Replaced:
    """Replace what can be replaced in `model`, and say so in one log line."""
    replaced = Replaced(model, backend, plan=plan or {}).replace()
    log.info("%s", replaced)
    return replaced


@contextmanager
def missing_model_is_an_error(name: str | Path) -> Iterator[None]:
    """Turn what mlx-lm and the hub raise for a model that is not there into `ModelNotFound`, and
    for files that are damaged into `CorruptFile`."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except MoEError:
        raise
    except (FileNotFoundError, NotADirectoryError, HfHubHTTPError, HFValidationError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
        if not Path(name).exists():
            reason = (
                f"there is no directory {str(name)!r}, and as a Hugging Face repository id "
                f"it failed: {reason}"
            )
        raise ModelNotFound(f"cannot load the model {str(name)!r}: {reason}") from error
    except json.JSONDecodeError as error:
        raise CorruptFile(f"the model {str(name)!r} has a damaged JSON file: {error}") from error
    except RuntimeError as error:
        if Path(name).is_dir():
            try:
                Checkpoint.open(name)  # names the file and what is wrong with it
            except MoEError as found:
                raise found from error
        raise


def trust_option(load: Callable[..., Any], trusted: bool) -> dict[str, Any]:
    """`trust_remote_code` where mlx-lm's `load` takes it: before 0.32 it trusts every model."""
    known = "trust_remote_code" in inspect.signature(load).parameters
    return {"trust_remote_code": trusted} if known else {}


def load_stock(
    name: str, trusted: bool, lazy: bool = False
) -> tuple[Any, Any, dict[str, Any], Path]:
    """Model, tokenizer and config as stock mlx-lm loads them, and the directory they came from."""
    with missing_model_is_an_error(name):
        directory = Path(mlx_lm.utils._download(name))
        loaded: Any = mlx_lm.utils.load(
            name,
            tokenizer_config={"trust_remote_code": trusted},
            return_config=True,
            lazy=lazy,
            **trust_option(mlx_lm.utils.load, trusted),
        )
    return *loaded, directory


def replace_dense(model: nn.Module, backend: str) -> Replacement | None:
    """Replace the dense layers where MLX computes on the CPU and `backend` lets us."""
    if backend == "stock" or mx.default_device() != mx.Device(mx.cpu):
        return None
    try:
        return replace_linear_layers(model, backend=backend)
    except NoMoELayers:
        return None


def load(
    path_or_repo: str | Path,
    *,
    backend: str = "auto",
    plan: Any = None,
    artifacts: str | Path | None = None,
    overflow: Overflow = "spill",
    importance: Importance = "router",
    rebalance: bool = False,
    expert_memory: int | str | ExpertMemory | None = None,
    group: Any = None,
    **options: Any,
) -> Any:
    """Load a model as `mlx_lm.load` does, with its layers replaced.

    With `expert_memory` the experts are not loaded: they stay in the model's files and are read
    when they are needed, at most so much of them at a time (see docs/store.md).

    Args:
        path_or_repo: a model directory or a Hugging Face repository id.
        backend, plan, artifacts, overflow, importance, expert_memory, group: as for
            `replace_moe_layers`. With `group`, only this rank's experts are read.
        rebalance: keep the plan up with routing as it shifts (`mlx_moe.follow`).
        **options: everything else goes to `mlx_lm.load` (adapter_path, lazy, ...).

    Returns:
        (model, tokenizer), and the config as a third item with `return_config=True`.

    Raises:
        ModelNotFound: no such directory or repository, or a file is missing.
        MoEError: a layer cannot be replaced. A model without MoE layers is no error:
            it is logged, and on a CPU-only MLX its dense layers are replaced.
        ValueError: from `mlx_lm.load`.
    """
    resolve_backend(backend)
    how: dict[str, Any] = {"overflow": overflow, "importance": importance}
    if plan is not None or artifacts is not None:
        how |= {"plan": plan, "artifacts": artifacts, "rebalance": rebalance}
    elif rebalance:
        raise InvalidArgument("rebalance keeps a plan up with routing: give plan")
    lazy = bool(options.pop("lazy", False))
    if group is not None:
        check_alone(plan=plan, expert_memory=expert_memory)
        how["group"] = group
    if expert_memory is not None:
        how["expert_memory"] = ExpertMemory.of(expert_memory)
        how["expert_memory"].check()
    with missing_model_is_an_error(path_or_repo):
        stock_lazy = lazy or expert_memory is not None or group is not None
        # Last, where experts are on disk: what adapters change of these would go unnoticed before.
        adapters = options.pop("adapter_path", None) if expert_memory is not None else None
        loaded = mlx_lm.utils.load(str(path_or_repo), lazy=stock_lazy, **options)
        if plan is not None or expert_memory is not None or group is not None:
            revision = {key: options[key] for key in ("revision",) if key in options}
            how["checkpoint"] = mlx_lm.utils._download(str(path_or_repo), **revision)
    replaced = replace_layers(loaded[0], backend, how)
    if adapters is not None:
        with missing_model_is_an_error(path_or_repo):
            mlx_lm.utils.load_adapters(loaded[0], adapters)
        loaded[0].eval()
    if stock_lazy and not lazy:
        replaced.read()
    return loaded
