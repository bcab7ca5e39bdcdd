"""What does training start from? Random linears, silent sublayers, streams that pass on.

Two things are there from the beginning, because copying what followed an earlier occurrence needs
them and they take longer to grow by themselves than all that is built on them. In the first layer a
head attends to the token before, and another to the one before that, whatever these are; both write
into channels of their own. In two later layers, heads attend to tokens that follow what the query's
token and the one before it are.
"""

from __future__ import annotations

import hashlib
import math

import torch

from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.tensor_specs import Shape, tensor_shapes

Tensors = dict[str, torch.Tensor]

LINEAR_GAIN = 0.7
EMBEDDING_DEVIATION = 0.5
READ, IGNORE = 2.0, -2.5
"""Logits of the stream that a site reads and of the others. Each site begins with another one."""
KEEP = 3.0
"""Logit of a stream going on as itself."""
CONSTANT = 2.0
"""What the first channels, one in 32, of every token's embedding are; attention has no biases."""
PITCHES = (3.0, 2.0, 1.0, 1.0, 1.0, 1.0)
"""How much of each rotation, the fastest first, is in the keys of heads that look back."""
PEAK = 14.0
"""Their logit at its distance; 3.5 less at the tokens next to it."""
CODE = 16
"""Channels of a token's code, by which it is found again."""
COPIED = 0.6
"""Of a head's output that the first layer writes."""
SHARPNESS = 2.5
"""Of the queries for a repeat."""


def initial_parameters(config: ModelConfig, seed: int) -> Tensors:
    """float32 by released name; each tensor depends on the seed and its own name alone."""
    parameters = {
        name: _initial(config, name, shape, _generator(seed, name))
        for name, shape in tensor_shapes(config).items()
    }
    _Copying(config, parameters, _generator(seed, "copying")).prepare()
    return parameters


class _Copying:
    """Gives parameters the heads that copying needs.

    The embedding's first channels are the same for every token, since attention has no biases; the
    two groups behind them are empty until the first layer writes the codes of earlier tokens there.
    """

    def __init__(
        self, config: ModelConfig, parameters: Tensors, generator: torch.Generator
    ) -> None:
        self._config, self._parameters = config, parameters
        d = config.hidden_size
        self._constant = slice(0, d // 32)
        self._previous = slice(d // 32, d // 32 + CODE)
        self._before = slice(d // 32 + CODE, d // 32 + 2 * CODE)
        self._code = torch.randn((CODE, d), generator=generator) / math.sqrt(d)
        self._code[:, : self._before.stop] = 0.0
        self._turn = torch.linalg.qr(torch.randn((CODE, CODE), generator=generator)).Q

    def prepare(self) -> None:
        embed = self._parameters["embed.weight"]
        embed[:, : self._before.stop] = 0.0
        embed[:, self._constant] = CONSTANT
        self._look_back()
        for layer in (2, self._config.split):
            self._find_repeats(layer)

    def _weight(self, layer: int, name: str) -> torch.Tensor:
        return self._parameters[f"layers.{layer}.attn.{name}.weight"]

    def _look_back(self) -> None:
        """Make two heads of layer 0 attend by distance, and write the codes of what they find.

        q_m . k_n has the real part of q conj(k) e^(i f (m - n)) for each rotation f, which is
        largest at m - n = D for a real k and q = e^(-i f D).
        """
        c = self._config
        wq_a, wq_b, wkv, wo_a, wo_b = (
            self._weight(0, name) for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
        )
        # A normed embedding's constant channels, summed, and what a linear makes of the others.
        mean_square = (EMBEDDING_DEVIATION**2 * 31 + CONSTANT**2) / 32
        total = CONSTANT * self._constant.stop / math.sqrt(mean_square)
        noise = (LINEAR_GAIN * EMBEDDING_DEVIATION) ** 2 / mean_square
        # Constant and other parts of the normed latent and of the normed key are equally large.
        wq_a[:, self._constant] = 0.0
        wq_a[0] = 0.0
        wq_a[0, self._constant] = math.sqrt(noise * c.q_lora_rank) / total
        latent = math.sqrt(c.q_lora_rank / 2)
        plain = c.head_dim - c.qk_rope_head_dim
        rotated = slice(plain, plain + 2 * len(PITCHES), 2)
        pitches = torch.tensor(PITCHES)
        keys = pitches * math.sqrt(noise * plain) / pitches.norm()
        wkv[:, self._constant] = 0.0
        wkv[:CODE] = self._code * LINEAR_GAIN
        wkv[plain:] = 0.0
        wkv[rotated, self._constant] = keys[:, None] / total
        keys = keys * math.sqrt(c.head_dim / 2) / keys.norm()
        size = PEAK / c.softmax_scale / float(keys.sum()) / latent
        frequencies = c.rope_theta ** (-2 * torch.arange(len(keys)) / c.qk_rope_head_dim)
        for number, channels in enumerate((self._previous, self._before)):
            angles = frequencies * (number + 1)
            rows = wq_b[number * c.head_dim : (number + 1) * c.head_dim]
            rows.zero_()
            rows[rotated, 0] = size * angles.cos()
            rows[plain + 1 : rotated.stop : 2, 0] = -size * angles.sin()
            lora = slice(number * CODE, (number + 1) * CODE)
            wo_a[lora] = 0.0
            wo_a[lora, number * c.head_dim : number * c.head_dim + CODE] = torch.eye(CODE)
            wo_b[channels, lora] = torch.eye(CODE) * COPIED

    def _find_repeats(self, layer: int) -> None:
        """Make half of a layer's heads attend to what followed the last two tokens before."""
        c = self._config
        wq_a, wq_b = self._weight(layer, "wq_a"), self._weight(layer, "wq_b")
        wq_a[:CODE] = self._code
        wq_a[:CODE, self._previous] = self._turn
        for head in range(c.num_attention_heads // 2):
            rows = wq_b[head * c.head_dim : (head + 1) * c.head_dim]
            rows.zero_()
            rows[:CODE, :CODE] = torch.eye(CODE) * SHARPNESS
        names = ["wkv"] if layer != c.split else ["wkv", "compressor.wkv"]
        for weight in (self._weight(layer, name) for name in names):
            weight[:CODE] = 0.0
            weight[:CODE, self._previous] = torch.eye(CODE)
            weight[:CODE, self._before] = self._turn


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _initial(
    config: ModelConfig, name: str, shape: Shape, generator: torch.Generator
) -> torch.Tensor:
    field = name.removesuffix(".weight").rpartition(".")[2]
    if field.endswith("norm") or field in ("q_weight", "k_weight"):
        return torch.ones(shape)
    if field in ("attn_sink", "bias", "wo_b", "w2"):
        return torch.zeros(shape)
    if field.startswith("hc_") and field.endswith("_base"):
        layer, site = int(name.split(".")[1]), int("ffn" in field)
        return _mixing(config.hc_mult, 2 * layer + site + 1)
    if field.startswith("hc_") and field.endswith("_scale"):
        return torch.full(shape, 0.1)
    noise = torch.randn(shape, generator=generator)
    if field == "embed":
        return noise * EMBEDDING_DEVIATION
    if field == "head":
        return noise * 0.02
    gain = {"fn": 1.0, "wgate": 0.1}.get(field.rpartition("_")[2], LINEAR_GAIN)
    return noise * gain / math.sqrt(shape[-1])


def _mixing(n: int, number: int) -> torch.Tensor:
    """The base of a site, whose `pre` is for the site after it, which has this number."""
    read = torch.full((n,), IGNORE)
    read[number % n] = READ
    return torch.cat((read, torch.zeros(n), (torch.eye(n) * KEEP).flatten()))
