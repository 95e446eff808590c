"""Kimi K3, which transformers does not have: random weights under the names of its files, against it written out.

Both are by the same hand, so that this checks how the description is wired and not what it was made from.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from oracle import Tiny
from oracle_graph import logits, program
from safetensors.torch import save_file
from torch import Tensor

V, C, HEADS, DIM, NOPE, ROT, VD, LOW, KV = 50, 64, 2, 16, 12, 8, 10, 24, 32
EXPERTS, CHOSEN, NARROW, INNER, DENSE = 6, 2, 32, 32, 48
CONFIG = {
    "model_type": "kimi_k3", "vocab_size": V, "hidden_size": C, "num_hidden_layers": 5, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "head_dim": 32, "intermediate_size": DENSE, "moe_intermediate_size": INNER,
    "num_experts": EXPERTS, "num_experts_per_token": CHOSEN, "num_shared_experts": 2, "moe_renormalize": True,
    "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 1.3, "first_k_dense_replace": 1,
    "q_lora_rank": LOW, "kv_lora_rank": KV, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROT, "v_head_dim": VD,
    "rms_norm_eps": 1e-2, "model_max_length": 128, "attn_res_block_size": 2, "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4, 5], "num_heads": HEADS, "head_dim": DIM,
                           "short_conv_kernel_size": 3, "gate_lower_bound": -5.0},
}  # fmt: skip
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Weights(dict[str, Tensor]):
    """The tensors of the file, and by the same name what packed ones stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.file: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(7)

    def random(self, name: str, *shape: int, shift: float = 0.0) -> None:
        value = torch.randn(shape, generator=self.generator)
        value = value / shape[-1] ** 0.5 if len(shape) > 1 else value * 0.2 + shift
        self[name] = self.file[f"language_model.{name}"] = value

    def packed(self, name: str, rows: int, columns: int) -> None:
        codes = torch.randint(0, 16, (rows, columns), generator=self.generator, dtype=torch.uint8)
        scale = torch.randint(123, 126, (rows, columns // 32), generator=self.generator, dtype=torch.uint8)
        self.file[f"language_model.{name}_packed"] = codes[:, 0::2] | (codes[:, 1::2] << 4)
        self.file[f"language_model.{name}_scale"] = scale
        sign = torch.where(codes >= 8, -1.0, 1.0)
        self[name] = sign * FP4[(codes & 7).long()] * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)


def made() -> Weights:
    w = Weights()
    w.random("model.embed_tokens.weight", V, C)
    w.random("lm_head.weight", V, C)
    for name in ("norm", "output_attn_res_norm"):
        w.random(f"model.{name}.weight", C, shift=1.0)
    w.random("model.output_attn_res_proj.weight", 1, C)
    for i in range(5):
        at = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            w.random(f"{at}.{name}.weight", C, shift=1.0)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            w.random(f"{at}.{name}.weight", 1, C)
        (linear_layer if i < 3 else latent_layer)(w, f"{at}.self_attn")
        (mixture if i else dense)(w, at)
    return w


def linear_layer(w: Weights, at: str) -> None:
    for name in "qkv":
        w.random(f"{at}.{name}_proj.weight", HEADS * DIM, C)
        w.random(f"{at}.{name}_conv1d.weight", HEADS * DIM, 1, 3)
    w.random(f"{at}.f_a_proj.weight", DIM, C)
    w.random(f"{at}.f_b_proj.weight", HEADS * DIM, DIM)
    w.random(f"{at}.g_proj.weight", HEADS * DIM, C)
    w.random(f"{at}.b_proj.weight", HEADS, C)
    w.random(f"{at}.A_log", HEADS)
    w.file[f"language_model.{at}.A_log"] = F.pad(w[f"{at}.A_log"], (0, 126)).view(1, 1, 128, 1)
    w.random(f"{at}.dt_bias", HEADS * DIM)
    w.random(f"{at}.o_norm.weight", DIM, shift=1.0)
    w.random(f"{at}.o_proj.weight", C, HEADS * DIM)


def latent_layer(w: Weights, at: str) -> None:
    w.random(f"{at}.q_a_proj.weight", LOW, C)
    w.random(f"{at}.q_b_proj.weight", HEADS * (NOPE + ROT), LOW)
    w.random(f"{at}.kv_a_proj_with_mqa.weight", KV + ROT, C)
    w.random(f"{at}.kv_b_proj.weight", HEADS * (NOPE + VD), KV)
    w.random(f"{at}.q_a_layernorm.weight", LOW, shift=1.0)
    w.random(f"{at}.kv_a_layernorm.weight", KV, shift=1.0)
    w.random(f"{at}.g_proj.weight", HEADS * VD, C)
    w.random(f"{at}.o_proj.weight", C, HEADS * VD)


def dense(w: Weights, at: str) -> None:
    for name, shape in (("gate", (DENSE, C)), ("up", (DENSE, C)), ("down", (C, DENSE))):
        w.random(f"{at}.mlp.{name}_proj.weight", *shape)


def mixture(w: Weights, at: str) -> None:
    at = f"{at}.block_sparse_moe"
    w.random(f"{at}.gate.weight", EXPERTS, C)
    w.random(f"{at}.gate.e_score_correction_bias", EXPERTS)
    w.random(f"{at}.routed_expert_down_proj.weight", NARROW, C)
    w.random(f"{at}.routed_expert_up_proj.weight", C, NARROW)
    w.random(f"{at}.routed_expert_norm.weight", NARROW, shift=1.0)
    for e in range(EXPERTS):
        for name, shape in (("w1", (INNER, NARROW)), ("w3", (INNER, NARROW)), ("w2", (NARROW, INNER))):
            w.packed(f"{at}.experts.{e}.{name}.weight", *shape)
    for name, shape in (("gate", (2 * INNER, C)), ("up", (2 * INNER, C)), ("down", (C, 2 * INNER))):
        w.random(f"{at}.shared_experts.{name}_proj.weight", *shape)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-2) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def situ(g: Tensor, u: Tensor) -> Tensor:
    return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)


def feed(w: Weights, at: str, x: Tensor, names: tuple[str, str, str]) -> Tensor:
    gate, up, down = (w[f"{at}.{name}.weight"] for name in names)
    return situ(x @ gate.T, x @ up.T) @ down.T


def delta(w: Weights, at: str, x: Tensor) -> Tensor:
    """Kimi delta attention, token by token."""
    parts = {}
    for name in "qkv":
        rows = F.pad(x @ w[f"{at}.{name}_proj.weight"].T, (0, 0, 2, 0))
        taps = w[f"{at}.{name}_conv1d.weight"][:, 0]
        parts[name] = F.silu(sum(rows[j : j + len(x)] * taps[:, j] for j in range(3))).view(-1, HEADS, DIM)
    q, k = (F.normalize(parts[name], dim=-1, eps=1e-12) for name in "qk")
    raw = x @ w[f"{at}.f_a_proj.weight"].T @ w[f"{at}.f_b_proj.weight"].T + w[f"{at}.dt_bias"]
    decay = torch.exp(-5 * torch.sigmoid(w[f"{at}.A_log"].exp().view(1, -1, 1) * raw.view(-1, HEADS, DIM)))
    beta = torch.sigmoid(x @ w[f"{at}.b_proj.weight"].T)
    out, state = [], torch.zeros(HEADS, DIM, DIM)
    for t in range(len(x)):
        state = state * decay[t].unsqueeze(-1)
        error = (parts["v"][t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t].unsqueeze(-1)
        state = state + torch.einsum("hk,hv->hkv", k[t], error)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * DIM**-0.5)
    gate = torch.sigmoid(x @ w[f"{at}.g_proj.weight"].T).view(-1, HEADS, DIM)
    return (rms(torch.stack(out), w[f"{at}.o_norm.weight"]) * gate).flatten(1) @ w[f"{at}.o_proj.weight"].T


def latent(w: Weights, at: str, x: Tensor) -> Tensor:
    """Latent attention without positions, keys and values written out."""
    low = rms(x @ w[f"{at}.q_a_proj.weight"].T, w[f"{at}.q_a_layernorm.weight"], 1e-6)
    q = (low @ w[f"{at}.q_b_proj.weight"].T).view(-1, HEADS, NOPE + ROT)
    both = x @ w[f"{at}.kv_a_proj_with_mqa.weight"].T
    kv = rms(both[:, :KV], w[f"{at}.kv_a_layernorm.weight"], 1e-6) @ w[f"{at}.kv_b_proj.weight"].T
    kv = kv.view(-1, HEADS, NOPE + VD)
    k = torch.cat([kv[..., :NOPE], both[:, None, KV:].expand(-1, HEADS, -1)], -1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), kv[..., NOPE:].transpose(0, 1), is_causal=True
    )
    out = out.transpose(0, 1).flatten(1) * torch.sigmoid(x @ w[f"{at}.g_proj.weight"].T)
    return out @ w[f"{at}.o_proj.weight"].T


def experts(w: Weights, at: str, x: Tensor) -> Tensor:
    at = f"{at}.block_sparse_moe"
    scores = torch.sigmoid(x @ w[f"{at}.gate.weight"].T)
    chosen = (scores + w[f"{at}.gate.e_score_correction_bias"]).topk(CHOSEN).indices
    narrow = x @ w[f"{at}.routed_expert_down_proj.weight"].T
    rows = []
    for t in range(len(x)):
        shares = scores[t, chosen[t]] / scores[t, chosen[t]].sum() * 1.3
        visits = [feed(w, f"{at}.experts.{e}", narrow[t], ("w1", "w3", "w2")) for e in chosen[t].tolist()]
        rows.append(sum(share * visit for share, visit in zip(shares, visits)))
    made = rms(torch.stack(rows), w[f"{at}.routed_expert_norm.weight"]) @ w[f"{at}.routed_expert_up_proj.weight"].T
    return made + feed(w, f"{at}.shared_experts", x, ("gate_proj", "up_proj", "down_proj"))


def mix(w: Weights, at: str, bank: list[Tensor], prefix: Tensor) -> Tensor:
    if not bank:
        return prefix
    weight = w[f"{at}_norm.weight"] * w[f"{at}_proj.weight"][0]
    entries = torch.stack([*bank, prefix])
    shares = (rms(entries, weight)).sum(-1).softmax(0)
    return (shares.unsqueeze(-1) * entries).sum(0)


def written_out(w: Weights, ids: list[int]) -> Tensor:
    prefix, bank = w["model.embed_tokens.weight"][ids], list[Tensor]()
    for i in range(5):
        at = f"model.layers.{i}"
        h = rms(mix(w, f"{at}.self_attention_res", bank, prefix), w[f"{at}.input_layernorm.weight"])
        y = (delta if i < 3 else latent)(w, f"{at}.self_attn", h)
        if i % 2 == 0:
            bank.append(prefix)
            prefix = y
        else:
            prefix = prefix + y
        h = rms(mix(w, f"{at}.mlp_res", bank, prefix), w[f"{at}.post_attention_layernorm.weight"])
        plain = ("gate_proj", "up_proj", "down_proj")
        prefix = prefix + (experts(w, at, h) if i else feed(w, f"{at}.mlp", h, plain))
    out = rms(mix(w, "model.output_attn_res", bank, prefix), w["model.norm.weight"])
    return out @ w["lm_head.weight"].T


def test_the_description_is_wired_as_the_model_is_written(tmp_path: Path) -> None:
    weights = made()
    vision = {"vision_tower.patch.weight": torch.zeros(2)}
    save_file({name: t.contiguous() for name, t in {**weights.file, **vision}.items()}, tmp_path / "model.safetensors")
    outer = {"model_type": "kimi_k3", "text_config": {**CONFIG, "model_type": "kimi_linear"}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    ids = torch.randint(0, V, (19,), generator=torch.Generator().manual_seed(1)).tolist()
    executable = program(Tiny("kimi-k3", tmp_path, [], [], []))
    expected = written_out(weights, ids)
    made_logits = logits(executable, ids, [8, 1, 7, 1, 1, 1])
    torch.testing.assert_close(made_logits, expected, rtol=1e-3, atol=1e-3 * float(expected.std()))
