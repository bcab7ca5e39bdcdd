"""Do the reference operations compute their definitions? Against float64, written out plainly."""

from __future__ import annotations

import math

import pytest
import torch

from ripresa.kernels import dispatch as ops

GENERATOR = torch.Generator().manual_seed(5)
ROWS = [1, 2, 15, 16, 17, 40]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def close(actual: torch.Tensor, expected: torch.Tensor, limit: float = 2e-5) -> None:
    assert actual.shape == expected.shape
    assert float((actual.double() - expected.double()).abs().max()) < limit


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("min_rows", [0, 16])
def test_linears(rows: int, min_rows: int) -> None:
    x, weight = normal(rows, 24), normal(10, 24)
    close(ops.linear(x, weight, min_rows), x.double() @ weight.double().T)
    grouped = normal(3, 5, 8)
    expected = torch.cat(
        [x.double()[:, 8 * g : 8 * g + 8] @ grouped[g].double().T for g in range(3)], 1
    )
    close(ops.grouped_linear(x, grouped, min_rows), expected)


def test_rms_norm_keeps_tiny_vectors_apart_from_zero() -> None:
    x = normal(3, 8)
    x[1] *= 1e-12
    x[2] = 0
    weight = normal(8)
    expected = weight.double() * x.double() / (x.double().square().mean(-1, True) + 1e-20).sqrt()
    close(ops.rms_norm(x, weight, 1e-20), expected)


@pytest.mark.parametrize("shape", [(7, 12), (7, 3, 12)])
def test_rope_rotates_pairs_of_the_last_channels_and_back(shape: tuple[int, ...]) -> None:
    frequencies = ops.rope_frequencies(8, 10000.0)
    positions = torch.tensor([0, 1, 2, 100, 5000, 70000, 900000])
    phases = ops.rope_phases(positions, frequencies)
    x = normal(*shape)
    rotated = ops.rope_(x.clone(), phases)
    assert torch.equal(rotated[..., :4], x[..., :4])
    for pair in range(4):
        angle = (positions.float() * frequencies[pair]).double()
        while angle.dim() < x.dim() - 1:
            angle = angle[:, None]
        a, b = x[..., 4 + 2 * pair].double(), x[..., 5 + 2 * pair].double()
        close(rotated[..., 4 + 2 * pair], a * angle.cos() - b * angle.sin())
        close(rotated[..., 5 + 2 * pair], a * angle.sin() + b * angle.cos())
    close(ops.rope_(rotated, phases.conj()), x)


def test_released_yarn_numbers() -> None:
    plain = 160000.0 ** (-torch.arange(32).double() / 32)
    frequencies = ops.rope_frequencies(64, 160000.0, 16.0, 32.0, 1.0, 65536)
    ramp = ((torch.arange(32).double() - 15) / 10).clamp(0, 1)
    close(frequencies, plain / 16 * ramp + plain * (1 - ramp), 1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("min_rows", [0, 16])
@pytest.mark.parametrize("iterations", [1, 4, 20])
def test_hyper_connections(rows: int, min_rows: int, iterations: int) -> None:
    n, d, eps = 4, 6, 1e-6
    streams, y = normal(rows, n, d), normal(rows, d)
    fn, base, scale = normal(24, n * d) / 3, normal(24), normal(3)
    pre, post, comb = ops.hc_mix(streams, fn, base, scale, iterations, eps, 1e-20, min_rows)
    flat = streams.double().flatten(1)
    m = flat @ fn.double().T / (flat.square().mean(-1, True) + 1e-20).sqrt()
    b, s = base.double(), scale.double()
    close(pre, torch.sigmoid(m[:, :4] * s[0] + b[:4]) + eps)
    close(post, 2 * torch.sigmoid(m[:, 4:8] * s[1] + b[4:8]))
    c = torch.softmax((m[:, 8:] * s[2] + b[8:]).view(rows, 4, 4), -1) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    close(comb, c.transpose(1, 2))
    collapsed = torch.einsum("tk,tkd->td", pre.double(), streams.double())
    close(ops.hc_collapse(streams, pre), collapsed)
    mixed = post.double()[:, :, None] * y.double()[:, None] + torch.einsum(
        "tjk,tjd->tkd", c, streams.double()
    )
    close(ops.hc_expand(y, streams, post, comb), mixed)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("min_rows", [0, 16])
def test_mixture_of_experts(rows: int, min_rows: int) -> None:
    experts, d, inner, limit = 5, 12, 7, 0.8
    x, gate, bias = normal(rows, d), normal(experts, d), normal(experts)
    w13, w2 = normal(experts, 2 * inner, d), normal(experts, d, inner)
    scores = ops.linear(x, gate)
    weights, picked = ops.moe_route(scores, bias, 2, 1.5, min_rows)
    sc = torch.nn.functional.softplus(scores.double()).sqrt()
    expected = torch.zeros(rows, d, dtype=torch.float64)
    for row in range(rows):
        best = (sc[row] + bias.double()).topk(2).indices
        assert set(best.tolist()) == set(picked[row].tolist())
        for e in best.tolist():
            share = sc[row, e] / sc[row, best].sum() * 1.5
            g = (w13[e, :inner].double() @ x[row].double()).clamp(max=limit)
            u = (w13[e, inner:].double() @ x[row].double()).clamp(-limit, limit)
            z = g * torch.sigmoid(g) * u * share
            expected[row] += w2[e].double() @ z
    close(ops.moe_experts(x, weights, picked, w13, w2, limit, min_rows), expected, 1e-4)


def test_compress_pairs_is_a_softmax_over_two_rows_for_each_channel() -> None:
    values, gates, weight = normal(9, 6), normal(9, 6), normal(6)
    first, second = torch.tensor([0, 8, 4]), torch.tensor([1, 3, 5])
    shares = torch.softmax(torch.stack((gates[first], gates[second])).double(), 0)
    pooled = (shares * torch.stack((values[first], values[second])).double()).sum(0)
    expected = weight.double() * pooled / (pooled.square().mean(-1, True) + 1e-20).sqrt()
    close(ops.compress_pairs(values, gates, first, second, weight, 1e-20), expected)


@pytest.mark.parametrize("rows", [1, 5])
def test_engram_injection(rows: int) -> None:
    n, d = 4, 8
    streams, projected = normal(rows, n, d), normal(rows, (n + 1) * d)
    q, k = normal(n, d), normal(n, d)
    keys, value = projected.view(rows, n + 1, d).double().split((n, 1), 1)

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, True) + 1e-20).sqrt()

    dot = (unit(streams.double()) * unit(keys) * q.double() * k.double()).sum(-1) / math.sqrt(d)
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    expected = streams.double() + gate[..., None] * value
    close(ops.engram_inject(streams, projected, q, k, 1e-20), expected)


@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("window", [1, 4, 8])
@pytest.mark.parametrize("with_pool", [False, True])
def test_window_attention(rows: int, window: int, with_pool: bool) -> None:
    heads, dim, scale = 3, 8, 0.3
    q, sink = normal(rows, heads, dim), normal(heads)
    buffer = torch.full((rows + 12, dim), float("nan"))
    hi = torch.arange(rows) + 9
    lo = torch.maximum(hi - window, torch.tensor(7))
    buffer[7 : 9 + rows] = normal(rows + 2, dim)
    pool = slots = None
    if with_pool:
        pool = torch.full((20, dim), float("nan"))
        pool[3:9] = normal(6, dim)
        slots = torch.randint(3, 9, (rows, 4), generator=GENERATOR)
        slots[:, 1] = -1
        slots[0] = -1
    out = ops.window_attention(q, buffer, lo, hi, sink, scale, window, pool, slots)
    for row in range(rows):
        keys = [buffer[int(lo[row]) : int(hi[row])]]
        if pool is not None and slots is not None:
            keys.append(pool[slots[row][slots[row] >= 0]])
        k = torch.cat(keys).double()
        for head in range(heads):
            scores = k @ q[row, head].double() * scale
            weights = torch.softmax(torch.cat((scores, sink[head : head + 1].double())), 0)
            close(out[row, head], weights[:-1] @ k)
