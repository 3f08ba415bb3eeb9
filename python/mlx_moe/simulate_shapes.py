"""Expert layers of some published models, from their config.json."""

from dataclasses import dataclass

from .layer_facts import LayerFacts, WeightFacts

FOUR_BITS = WeightFacts("affine", 4, 64, "bfloat16")  # as mlx-lm converts by default
MXFP4 = WeightFacts("mxfp4", 4, 32, "mxfp4")


@dataclass(frozen=True)
class Shape:
    """A model's expert layers.

    Attributes:
        layers: that have experts.
        experts, top_k, hidden, inner: of each.
        heads, kv_heads, head_size: of its attention.
    """

    family: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    weights: WeightFacts = FOUR_BITS

    def facts(self) -> list[LayerFacts]:
        return [
            LayerFacts(
                name=f"model.layers.{i}.mlp.experts",
                family=self.family,
                kind="glu",
                experts=self.experts,
                top_k=self.top_k,
                hidden=self.hidden,
                inner=self.inner,
                activation="SwiGLU",
                biases=False,
                weights=self.weights,
            )
            for i in range(self.layers)
        ]

    @property
    def attention_weights(self) -> int:
        """Of one layer's four projections."""
        return 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)

    def attention_flops(self, tokens: int, before: int) -> float:
        """Of one layer for a chunk of tokens with others before it in the cache: the projections,
        and causal scores and sums."""
        pairs = tokens * before + tokens * (tokens + 1) / 2
        return 2.0 * tokens * self.attention_weights + 4.0 * pairs * self.heads * self.head_size


SHAPES = {
    "gpt-oss-20b": Shape("gpt_oss", 24, 32, 4, 2880, 2880, 64, 8, 64, MXFP4),
    "mixtral-8x7b": Shape("mixtral", 32, 8, 2, 4096, 14336, 32, 8, 128),
    "olmoe-1b-7b": Shape("olmoe", 16, 64, 8, 2048, 1024, 16, 16, 128),
    "phi-3.5-moe": Shape("phimoe", 32, 16, 2, 4096, 6400, 32, 8, 128),
    "phi-tiny-moe": Shape("phimoe", 32, 16, 2, 4096, 448, 16, 4, 128),
    "qwen3-30b-a3b": Shape("qwen3_moe", 48, 128, 8, 2048, 768, 32, 4, 128),
}
