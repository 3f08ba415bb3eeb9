"""What one of two ranks does in test_distributed.py: compares itself with one process, and says
what it found as one line of JSON."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx

mx.set_default_device(mx.cpu)

import mlx.nn as nn  # noqa: E402
import mlx_lm  # noqa: E402
import numpy as np  # noqa: E402
from families import FAMILIES, build, quantize, switches  # noqa: E402

import mlx_moe  # noqa: E402
from mlx_moe import attention, dense, layers  # noqa: E402
from mlx_moe.distributed import Ranks, join  # noqa: E402
from mlx_moe.errors import MoEError  # noqa: E402

for module in (attention, dense, layers):  # as conftest.py: kernels at any size
    for name in [name for name in vars(module) if name.startswith("SMALLEST")]:
        setattr(module, name, 0)

# family, quantisation, split, backend: from memory, unless "disk" is the last.
CASES: dict[str, tuple[str, dict[str, Any] | None, str, str, str]] = {
    "fused, whole experts": ("qwen3_moe", None, "none", "cpu", "memory"),
    "fused, slices": ("qwen3_moe", None, "all", "cpu", "memory"),
    "fused, some of each, 4-bit": ("olmoe", {"group_size": 32}, "auto", "cpu", "disk"),
    "biases, no fused sum, slices": ("gpt_oss", None, "all", "cpu", "disk"),
    "biases, no fused sum": ("gpt_oss", None, "none", "cpu", "memory"),
    "two matrices": ("nemotron_h", None, "auto", "cpu", "memory"),
    "nvfp4, slices": ("mixtral", {"group_size": 16, "mode": "nvfp4"}, "all", "cpu", "disk"),
    "graph, slices": ("qwen3_moe", None, "auto", "stock", "memory"),
    "graph, whole experts": ("gpt_oss", None, "none", "stock", "memory"),
}
# The first one finds out that the routers differ.
DISAGREE = (
    "fused, whole experts",
    "biases, no fused sum",
    "graph, slices",
    "graph, whole experts",
)
SKEWED = [40.0, 1, 2, 1, 3, 1, 2, 1]  # one expert that one rank would wait for


def model_of(case: str) -> nn.Module:
    family, how = CASES[case][:2]
    model = build(next(f for f in FAMILIES if f.name == family))
    return model if how is None else quantize(model, **how)


def forwards(model: nn.Module) -> dict[str, mx.array]:
    """Logits of a prompt of two texts and of one token."""
    tokens = mx.array(np.random.default_rng(5).integers(0, 128, (2, 11)))
    found = {"prompt": model(tokens), "token": model(tokens[:1, :1])}
    mx.eval(found)
    return found


def error(got: mx.array, want: mx.array) -> float:
    difference = (got.astype(mx.float32) - want.astype(mx.float32)).square().sum()
    return float((difference / want.astype(mx.float32).square().sum()).sqrt())


def compare(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Errors against one process, and what the rank held."""
    *_, split, backend, source = CASES[case]
    model = model_of(case)
    replacement = mlx_moe.replace_moe_layers(model, backend=backend)
    want = forwards(model)
    replacement.restore()
    checkpoint = None
    if source == "disk":
        checkpoint = folder / case.replace(" ", "_") / str(ranks.rank)
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
        model.save_weights(str(checkpoint / "model.safetensors"))
    ranks.split, ranks.counts = split, None
    if split == "auto" and source == "disk":
        ranks.counts = {name: SKEWED for name, _ in switches(model)}
    before = mlx_moe.core.calls()
    replacement = mlx_moe.replace_moe_layers(
        model, backend=backend, group=ranks, checkpoint=checkpoint
    )
    got = forwards(model)
    ranked = [row._layer.ranked for row in replacement.layers]
    found = {
        "errors": {key: error(got[key], want[key]) for key in want},
        "share": sum(r.nbytes for r in ranked) / sum(r.total_bytes for r in ranked),
        "widths": sorted({s.end - s.begin for r in ranked for s in r.placement.slices(ranks.rank)}),
        "kernels": sum(mlx_moe.core.calls().values()) - sum(before.values()),
        "bits": [np.array(a.astype(mx.float32)).tobytes().hex()[-400:] for a in got.values()],
    }
    if source == "disk":
        replacement.restore()
        mlx_moe.replace_moe_layers(model, backend=backend)
        again = forwards(model)
        found["restored"] = all(bool(mx.array_equal(again[k], want[k])) for k in want)
    return found


def refused(call: Any) -> str:
    """The message of a MoEError that `call` raises, on all ranks alike."""
    try:
        call()
    except MoEError as err:
        return f"{type(err).__name__}: {err}"
    return "nothing was raised"


def refusals(ranks: Ranks) -> dict[str, str]:
    ranks.split, ranks.counts = "auto", None
    model = model_of("fused, slices")
    replace = mlx_moe.replace_moe_layers
    found = {
        "plan": refused(lambda: replace(model, plan="p.json", group=ranks)),
        "group": refused(lambda: replace(model, group=3)),
        "options": refused(lambda: Ranks(split="all" if ranks.first else "none")),
    }
    backend = "cpu" if ranks.first else "stock"
    ranks.split = "all"
    found["backend"] = refused(lambda: replace(model, backend=backend, group=ranks))
    ranks.split = "auto"
    other = model_of("two matrices") if ranks.first else model_of("fused, slices")
    found["model"] = refused(lambda: replace(other, group=ranks))
    ranks.split = "all" if ranks.first else "none"
    found["placement"] = refused(lambda: replace(model, group=ranks))
    ranks.split = "auto"
    replacement = replace(model, group=ranks)
    found["twice"] = refused(lambda: replace(model, group=ranks))
    found["alone"] = refused(lambda: replace(model))
    found["restore"] = refused(replacement.restore)
    tokens = mx.array([[1, 2, 3]])
    model.train()
    found["training"] = refused(lambda: mx.eval(model(tokens)))
    model.eval()
    loss = lambda x: model.model.layers[0].mlp(x).sum()  # noqa: E731
    found["gradient"] = refused(lambda: mx.eval(mx.grad(loss)(mx.ones((1, 3, 64)))))
    graph = model_of("fused, slices")
    replace(graph, backend="stock", group=ranks)
    loss = lambda x: graph.model.layers[0].mlp(x).sum()  # noqa: E731
    found["gradient of a graph"] = refused(lambda: mx.eval(mx.grad(loss)(mx.ones((1, 3, 64)))))
    _, switch = switches(model)[0]
    switch.up_proj.weight = mx.zeros(switch.up_proj.weight.shape)
    found["changed"] = refused(lambda: mx.eval(model(tokens)))
    return found


def example(ranks: Ranks, path: str) -> dict[str, Any]:
    """The trained model as `load` gives it: greedy text, and the bytes that were read."""
    ranks.split, ranks.counts = "auto", None
    read = []
    for group in (None, None, ranks):  # the first one imports
        before = read_so_far()
        model, tokenizer = mlx_moe.load(path, group=group)
        read.append(read_so_far() - before)
    text = mlx_lm.generate(model, tokenizer, "In the beginning", max_tokens=6)
    ranked = [m.__dict__["_moe_layer"].ranked for _, m in switches(model)]
    graph, _ = mlx_moe.load(path, group=ranks, backend="stock")
    sampler = ranks.sampler(lambda logprobs: mx.argmax(logprobs, axis=-1))
    return {
        "text": text,
        "text of a graph": mlx_lm.generate(
            graph, tokenizer, "In the beginning", max_tokens=3, sampler=sampler
        ),
        "spared": read[1] - read[2],
        "held": sum(r.nbytes for r in ranked),
        "whole": sum(r.total_bytes for r in ranked),
    }


def read_so_far() -> int:
    """Bytes that this process read, where Linux counts them; else always 0."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:
        return 0


def disagree(ranks: Ranks, case: str) -> dict[str, Any]:
    """Ranks whose routers differ: rank 0's choice is what counts."""
    _, _, ranks.split, backend, _ = CASES[case]
    ranks.counts = None
    model = model_of(case)
    replacement = mlx_moe.replace_moe_layers(model, backend=backend)
    want = forwards(model)
    replacement.restore()
    if not ranks.first:
        for layer in model.model.layers:
            gate = layer.mlp["gate" if "gate" in layer.mlp else "router"]
            gate.weight = -gate.weight
    # Identity is of the experts alone where the model is in memory.
    mlx_moe.replace_moe_layers(model, backend=backend, group=ranks)
    got = forwards(model)
    return {"errors": {k: error(got[k], want[k]) for k in want}, "sends": ranks.sends_routing}


def other_order(ranks: Ranks, backend: str) -> float:
    """The error of outputs whose experts rank 0 has in another order than rank 1."""
    ranks.split, ranks.counts = "none", None
    model = model_of("biases, no fused sum")
    _, switch = switches(model)[0]
    x, ids = mx.random.normal((3, 64), key=mx.random.key(1)), mx.array([[0, 1], [5, 2], [7, 6]])
    ids = ids if ranks.first else ids[:, ::-1]
    want = switch(x, ids)
    mx.eval(want)
    mlx_moe.replace_moe_layers(model, backend=backend, group=ranks)
    return error(switch(x, ids), want)


def replaced_before(ranks: Ranks) -> dict[str, Any]:
    """Layers that were replaced already, and in training mode meanwhile, and whose experts
    cannot be cut as asked."""
    ranks.split, ranks.counts = "all", None
    model = model_of("fused, slices")
    nn.quantize(model, 128, 4, class_predicate=lambda path, _: "switch_mlp.down" in path)
    mlx_moe.replace_moe_layers(model)
    model.train()
    replacement = mlx_moe.replace_moe_layers(model, group=ranks)
    model.eval()
    forwards(model)
    kernels = [layer["kernel_calls"] for layer in replacement.stats().values()]
    shared = [layer["ranks"] for layer in replacement.stats().values()]
    return {"kernels": kernels, "note": replacement.note, "ranks": shared}


def watches(ranks: Ranks) -> int:
    """Threads that watch, once two models were given one group beside these ranks."""
    for _ in range(2):
        mlx_moe.replace_moe_layers(model_of("fused, slices"), group=ranks.group)
    return sum(thread.name == "mlx_moe ranks" for thread in threading.enumerate())


def sharded(ranks: Ranks) -> dict[str, Any]:
    """mlx-lm's own sharding: the block sums, our layers compute their partial sums."""
    model = model_of("fused, slices")
    replacement = mlx_moe.replace_moe_layers(model)
    want = forwards(model)
    replacement.restore()
    model.shard(ranks.group)
    found: dict[str, Any] = {}
    for name, group in (("without group", None), ("with group", ranks)):
        replacement = mlx_moe.replace_moe_layers(model, group=group)
        before = sum(mlx_moe.core.calls().values())
        got = forwards(model)
        found[name] = {k: error(got[k], want[k]) for k in want}
        found[f"kernels {name}"] = sum(mlx_moe.core.calls().values()) - before
    return found | {"note": replacement.note}


def main() -> None:
    folder, example_path = Path(sys.argv[1]), sys.argv[2]
    ranks = join(timeout=120)
    assert ranks is not None
    found: dict[str, Any] = {"cases": {c: compare(c, ranks, folder) for c in CASES}}
    found["refusals"] = refusals(ranks)
    found["example"] = example(ranks, example_path)
    found["disagree"] = {case: disagree(ranks, case) for case in DISAGREE}
    found["other order"] = {backend: other_order(ranks, backend) for backend in ("cpu", "stock")}
    found["replaced before"] = replaced_before(ranks)
    found["sharded"] = sharded(ranks)
    found["watches"] = watches(ranks)
    ranks.finish()
    (folder / f"found{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
