"""The Llama family: Llama, SmolLM, Mistral, Qwen2, Qwen3.

One decoder with switches for what differs: biases, norms of queries and keys, windows. Activations are
[num_tokens, size], all requests of a step side by side; what belongs to whom is in the attention plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from maniple_kernels.decoder_layer import DecoderLayers, LayerShape, LayerWeights
from maniple_kernels.paged_attention import AttentionPlan, attention_scale
from maniple_kernels.rms_norm import rms_norm
from maniple_kernels.rotary import norm_and_rotate_
from maniple_kernels.silu_mul import silu_mul
from worker_service.attention.base import KvLayer, StepAttention
from worker_service.models.checkpoint import Slot
from worker_service.models.config import LlamaConfig, load_config
from worker_service.models.layers import Cut, Embedding, FusedLinear, Placement, RowLinear, VocabLinear
from worker_service.models.rope import cosines_and_sines


class Attention:
    """Self-attention over the paged cache."""

    def __init__(self, config: LlamaConfig, placement: Placement, window: int) -> None:
        # With more ranks than KV heads several ranks keep the same one, beside different query heads of its group.
        kv_parts = min(config.num_kv_heads, placement.world_size)
        self.num_heads = placement.share(config.num_heads, "attention heads")
        self.num_kv_heads = config.num_kv_heads // kv_parts
        self.head_dim = config.head_dim
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        query, kv = Cut(query_size, placement.world_size), Cut(kv_size, kv_parts)
        cuts = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        self.qkv = FusedLinear(placement, config.hidden_size, cuts, bias=config.qkv_bias)
        self.output = RowLinear(placement, query_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = placement.empty(config.head_dim) if config.qk_norm else None
        self.k_norm = placement.empty(config.head_dim) if config.qk_norm else None
        self._eps = config.rms_norm_eps
        self._scale = attention_scale(config.head_dim)
        self.window = window

    def slots(self, prefix: str) -> dict[str, Slot]:
        result = self.qkv.slots(f"{prefix}self_attn.") | self.output.slots(f"{prefix}self_attn.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            result[f"{prefix}self_attn.q_norm.weight"] = Slot(self.q_norm)
            result[f"{prefix}self_attn.k_norm.weight"] = Slot(self.k_norm)
        return result

    def __call__(
        self, x: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, kv: KvLayer, attention: StepAttention
    ) -> Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        query, key, value = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        norm_and_rotate_(
            heads[:, :num_rotated],
            cos_sin,
            positions,
            num_query_heads=self.num_heads,
            query_norm=self.q_norm,
            key_norm=self.k_norm,
            eps=self._eps,
        )
        attention.store(key, value, slots, kv)
        attended = attention.attend(query, kv, self._scale, self.window)
        return self.output(attended.view(len(x), -1))


class DecoderLayer:
    """Attention and a gated MLP, each behind a norm and beside a residual stream."""

    def __init__(self, config: LlamaConfig, placement: Placement, window: int) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.attention = Attention(config, placement, window)
        cut = Cut(inner, placement.world_size)
        self.gate_up = FusedLinear(placement, size, {"gate_proj": cut, "up_proj": cut}, bias=config.mlp_bias)
        self.down = RowLinear(placement, inner, size, bias=config.mlp_bias)
        self.attention_norm = placement.empty(size)
        self.mlp_norm = placement.empty(size)

    def slots(self, prefix: str) -> dict[str, Slot]:
        norms = {"input_layernorm": self.attention_norm, "post_attention_layernorm": self.mlp_norm}
        return (
            self.attention.slots(prefix)
            | self.gate_up.slots(f"{prefix}mlp.")
            | self.down.slots(f"{prefix}mlp.down_proj")
            | {f"{prefix}{name}.weight": Slot(weight) for name, weight in norms.items()}
        )

    def pack(self) -> None:
        """Bring weights into the form they are computed in."""
        for linear in (self.attention.qkv, self.attention.output, self.gate_up, self.down):
            linear.pack()

    def fused_weights(self) -> LayerWeights | None:
        """Return the layer as one kernel takes it, if it does."""
        attention = self.attention
        norms = attention.q_norm, attention.k_norm
        found = [linear.fused_weights for linear in (attention.qkv, attention.output, self.gate_up, self.down)]
        qkv, output, gate_up, down = found
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        return LayerWeights(
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            attention_norm=self.attention_norm,
            mlp_norm=self.mlp_norm,
            head_norms=None if norms[0] is None or norms[1] is None else (norms[0], norms[1]),
            window=attention.window,
        )


class LlamaModel:
    """Embedding, decoder layers, final norm and the projection to logits, on one rank."""

    records = True

    def __init__(self, config: LlamaConfig, placement: Placement, max_model_len: int) -> None:
        """Allocate the weights; their contents are undefined until ``slots`` were filled and ``pack`` was called."""
        self.config = config
        self._eps = config.rms_norm_eps
        self.embedding = Embedding(placement, config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, placement, window) for window in config.windows]
        self.norm = placement.empty(config.hidden_size)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = VocabLinear(placement, config.hidden_size, config.vocab_size, tied_to=tied)
        self._cos_sin = cosines_and_sines(config.rope, max_model_len).to(placement.device)
        self._placement = placement
        self._fused: DecoderLayers | None = None  # since ``pack``, where the weights suit it

    def slots(self) -> dict[str, Slot]:
        """Return where each tensor of a checkpoint goes."""
        result = self.embedding.slots("model.embed_tokens") | {"model.norm.weight": Slot(self.norm)}
        for index, layer in enumerate(self.layers):
            result |= layer.slots(f"model.layers.{index}.")
        return result | self.head.slots("lm_head")

    def ignores(self, name: str) -> bool:
        """Say whether a tensor of a checkpoint has no meaning here: old buffers, and a copy of the tied embedding."""
        return name.endswith("rotary_emb.inv_freq") or (self.config.tie_word_embeddings and name == "lm_head.weight")

    def pack(self) -> None:
        """Bring weights into the form they are computed in. Once, after loading."""
        for layer in self.layers:
            layer.pack()
        self._pack_vocabulary()
        self._fused = self._fuse()

    def load_in_parts(self, load: Callable[[dict[str, Slot]], None]) -> None:
        """Load and pack one part after the other: never more than one lies there in the form of the checkpoint."""
        for index, layer in enumerate(self.layers):
            load(layer.slots(f"model.layers.{index}."))
            layer.pack()
        load(self.embedding.slots("model.embed_tokens") | {"model.norm.weight": Slot(self.norm)})
        load(self.head.slots("lm_head"))
        self._pack_vocabulary()
        self._fused = self._fuse()

    def _pack_vocabulary(self) -> None:
        self.embedding.pack()
        self.head.pack()

    def _fuse(self) -> DecoderLayers | None:
        """Return the layers as one kernel each, if all weights are there, and in a form that it takes."""
        config = self.config
        shape = LayerShape(
            size=config.hidden_size,
            inner_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=self._eps,
            scale=attention_scale(config.head_dim),
        )
        if self._placement.world_size > 1 or not shape.fits:
            return None
        found = [layer.fused_weights() for layer in self.layers]
        layers = [layer for layer in found if layer is not None]
        return DecoderLayers(layers, shape, self._cos_sin) if len(layers) == len(found) else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on this rank, as they are kept."""
        total = self.head.num_bytes + self.embedding.num_bytes + self.norm.numel() * self.norm.element_size()
        for layer in self.layers:
            linears = (layer.attention.qkv, layer.attention.output, layer.gate_up, layer.down)
            norms = (layer.attention_norm, layer.mlp_norm, layer.attention.q_norm, layer.attention.k_norm)
            total += sum(linear.num_bytes for linear in linears)
            total += sum(norm.numel() * norm.element_size() for norm in norms if norm is not None)
        return total

    def forward(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, kv: Sequence[KvLayer], attention: StepAttention
    ) -> Tensor:
        """Compute the hidden states of a step's tokens, and write their keys and values into the cache.

        Args:
            input_ids: [num_tokens] int32.
            positions: [num_tokens] int64.
            slots: [num_tokens] int64, where each token's keys and values go.
            kv: the caches of each layer.
            attention: of this step.
        Returns:
            [num_tokens, hidden_size] float32, the residual stream; ``logits`` does the rest for tokens that need it.
        """
        residual = self.embedding(input_ids).float()
        if isinstance(attention, AttentionPlan) and (fused := self._fused_for(len(residual), kv)) is not None:
            fused.run(residual, positions, slots, kv, attention)
            return residual
        x = rms_norm(residual, self.layers[0].attention_norm, self._eps)
        for index, layer in enumerate(self.layers):
            x = layer.attention(x, positions, slots, self._cos_sin, kv[index], attention)
            x = rms_norm(x, layer.mlp_norm, self._eps, residual)
            x = layer.down(silu_mul(layer.gate_up(x)))
            if index + 1 < len(self.layers):
                x = rms_norm(x, self.layers[index + 1].attention_norm, self._eps, residual)
        return residual.add_(x)

    def _fused_for(self, num_tokens: int, kv: Sequence[KvLayer]) -> DecoderLayers | None:
        fused = self._fused
        if fused is None or not self.layers[0].down.is_for_panels(num_tokens):
            return None
        return fused if fused.fits(kv) else None

    @property
    def num_heads(self) -> int:
        """Query heads on this rank."""
        return self.layers[0].attention.num_heads

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.config.head_dim

    @staticmethod
    def read_config(directory: Path) -> LlamaConfig:
        """Read the configuration of another checkpoint."""
        return load_config(directory)

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return self.layers[0].attention.num_kv_heads

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return [num_rows, vocab_size] float32 scores of the residual streams ``hidden``; on ranks but 0 None.

        Valid until it is called again.
        """
        return self.head.scores(self.final_hidden(hidden))

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """Return [num_rows, hidden_size] of the residual streams ``hidden``, behind the final norm."""
        return rms_norm(hidden, self.norm, self._eps)
