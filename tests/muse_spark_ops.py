"""Plain MLX operations in place of muse_spark's Metal kernels, so that it runs on a CPU.

Same mathematics as the functions of mlx_lm.kernels; rounding inside them may differ, which does
not matter here: the stock and the replaced model both use these.
"""

from __future__ import annotations

from types import ModuleType

import mlx.core as mx


def _norm(x: mx.array, eps: float) -> mx.array:
    return mx.fast.rms_norm(x.astype(mx.float32), None, eps)


def qk_norm(qkvg, *, n_heads, n_kv_heads, head_dim, eps, query_scale):
    rows = (n_heads + n_kv_heads) * head_dim
    heads = mx.unflatten(qkvg[..., :rows], -1, (-1, head_dim))
    normed = _norm(heads, eps)
    q, k = normed[..., :n_heads, :] * query_scale, normed[..., n_heads:, :]
    return q.astype(qkvg.dtype), k.astype(qkvg.dtype)


def qk_norm_rope(qkvg, *, rope_base, offset, **how):
    dims = how["head_dim"]

    def rotate(x):
        turned = mx.fast.rope(
            x.swapaxes(-2, -3), dims, traditional=True, base=rope_base, scale=1.0, offset=offset
        )
        return turned.swapaxes(-2, -3)

    q, k = qk_norm(qkvg, **how)
    return rotate(q), rotate(k)


def rms_norm_sigmoid_gate(x, gate, *, eps):
    batch, heads, length, dims = x.shape
    normed = _norm(x, eps).transpose(0, 2, 1, 3).reshape(batch, length, heads * dims)
    return (normed * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)


def pre_norm(stream, norm, *, dtype):
    return (_norm(stream, norm.eps) * norm.weight).astype(dtype)


def norm_add_norm(branch, stream, *, alpha, beta, post_weight, post_eps, next_norm):
    scaled = branch if post_weight is None else branch * post_weight.astype(branch.dtype)
    added = alpha * stream + beta * _norm(scaled, post_eps)
    if next_norm is None:
        return added, None
    return added, pre_norm(added, next_norm, dtype=branch.dtype)


def expert_routing(logits, expert_bias, *, top_k, multiplier, score_eps, route_scale):
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    total = weights.sum(axis=-1, keepdims=True) + score_eps
    return chosen.astype(mx.uint32), weights / total * route_scale


def post_expert_norm_combine(experts, weights, *, norm_weight, eps):
    normed = _norm(experts.astype(mx.float32) * norm_weight, eps)
    return (normed * weights[..., None]).sum(axis=-2).astype(experts.dtype)


def install(module: ModuleType) -> None:
    """Put these functions in `module` (mlx_lm.models.muse_spark) for the rest of the process."""
    for function in (
        qk_norm,
        qk_norm_rope,
        rms_norm_sigmoid_gate,
        pre_norm,
        norm_add_norm,
        expert_routing,
        post_expert_norm_combine,
    ):
        setattr(module, function.__name__, function)
