"""Generate text and record the routing of each expert layer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler

from .cache_trace import Trace, TracedLayer, TraceRecorder
from .facts import layer_facts
from .identity import identity_of_model
from .layers import PROJECTIONS, Layer, Observer
from .observe import observed
from .progress import progress_bar
from .replace import find_modules, switch_kind
from .sizes import slot_size


def record(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    files: str | Path | None = None,
    backend: str = "auto",
    progress: bool = False,
) -> Trace:
    """Continue each prompt by up to `max_tokens` tokens and record every forward's experts.

    Args:
        model, tokenizer: from `mlx_lm.load` or `mlx_moe.load`.
        prompts: token ids.
        temperature, seed: of the sampling; 0 takes the likeliest token.
        files: the model's directory, by which it is known again more surely.
        backend: for layers that are not replaced yet, as for `replace_moe_layers`.
        progress: show a progress bar on stderr.

    Raises NoMoELayers for a model without expert layers.
    """
    facts = layer_facts(model)
    recorder = TraceRecorder([], identity_of_model(model, files))
    recorder.layers += [
        TracedLayer(fact.name, fact.experts, fact.top_k, slot_bytes(module))
        for fact, (_, module, _) in zip(facts, _layers(model), strict=True)
    ]

    def observer(number: int) -> Observer:
        def observe(
            module: Any, layer: Layer, x: mx.array, ids: mx.array, scores: mx.array | None
        ) -> None:
            mx.eval(ids)
            recorder.add(number, np.array(ids).reshape(-1, ids.shape[-1]))

        return observe

    mx.random.seed(seed)
    sampler = make_sampler(temp=temperature)
    observers = {fact.name: observer(number) for number, fact in enumerate(facts)}
    with (
        observed(model, observers, backend),
        progress_bar(progress, unit="tok") as bar,
    ):
        for prompt in prompts:
            given = mx.array(list(prompt))
            for _ in stream_generate(
                model, tokenizer, given, max_tokens=max_tokens, sampler=sampler
            ):
                bar.update(1)
    return recorder.trace()


def _layers(model: nn.Module) -> list[Any]:
    return find_modules(model, lambda module: switch_kind(module) is not None)


def slot_bytes(module: Any) -> int:
    """Bytes of the slot that one of the layer's experts would take."""
    kind = switch_kind(module)
    assert kind is not None
    linears = (module[name] for name in PROJECTIONS[kind])
    return slot_size(
        array.nbytes // array.shape[0]
        for linear in linears
        for array in linear.get("linear", linear).values()  # adapters wrap their base layer
        if isinstance(array, mx.array)
    )
