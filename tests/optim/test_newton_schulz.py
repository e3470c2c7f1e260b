# SPDX-License-Identifier: Apache-2.0
"""The orthogonal factor against float64: accuracy by condition, scale, precision, shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import optim_reference as ref

from dsv4_jax.optim import COEFFICIENTS, HYBRID, newton_schulz

RNG = np.random.default_rng(0)


def run(x, **options):
    factor = jax.jit(functools.partial(newton_schulz, **options))
    return np.asarray(factor(jnp.asarray(x, jnp.float32)), np.float64)


@pytest.mark.parametrize("form", [{}, {"gram": True}, {"precision": "bfloat16"}], ids=str)
@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (64, 64)])
def test_accuracy_by_condition(shape, form):
    """Singular values within 2.1e-3 of 1 and the factor itself, which the values alone do not show."""
    bf16 = "precision" in form
    for condition in (1, 1e1, 1e3, 1e4):
        x = ref.matrix(RNG, *shape, condition)
        y = run(x, **form)
        assert np.abs(np.linalg.svd(y)[1] - 1).max() <= (1e-2 if bf16 else 2.1e-3)
        assert np.linalg.norm(y - ref.polar(x)) / np.sqrt(min(shape)) <= (2e-2 if bf16 else 5e-4)


@pytest.mark.parametrize(
    "s, value", [(1e-5, 0.686), (1e-4, 1.00201), (1e-3, 1.0000012), (0.1, 1.0000607), (0.5, 1.000163)]
)
def test_the_scalar_map(s, value):
    """What becomes of a singular value that is `s` of the norm."""
    y = run(np.diag([s, np.sqrt(1 - s * s)]))
    np.testing.assert_allclose(y[0, 0], value, atol=5e-4 if s < 1e-4 else 1e-5)
    assert abs(y[0, 1]) + abs(y[1, 0]) == 0


def test_what_the_null_space_gets():
    """A matrix of rank k/4: nothing in fp32, a little with bf16 operands, ones with bf16 storage."""
    x = RNG.normal(size=(64, 16)) @ RNG.normal(size=(16, 256))
    _, _, vt = np.linalg.svd(x)
    noise = {p: np.linalg.norm(run(x, precision=p) @ vt[16:].T, 2) for p in ("float32", "bfloat16", "bfloat16_storage")}
    assert noise["float32"] < 2e-3 and run(x, gram=True).std() < 1.01 * run(x).std()
    assert noise["bfloat16"] < 0.1 < 0.5 < noise["bfloat16_storage"]


def test_scale_does_not_matter():
    x = RNG.normal(size=(16, 32))
    want = run(x)
    for scale in 10.0 ** np.arange(-30, 31, 6):
        np.testing.assert_allclose(run(x * scale), want, atol=1e-6)
    assert run(x * 1e-12, precision="bfloat16").std() == pytest.approx(want.std(), rel=1e-2)


@pytest.mark.parametrize("form", [{}, {"gram": True}, {"precision": "bfloat16_storage"}], ids=str)
def test_zero_stays_zero_beside_others(form):
    x = np.stack([np.zeros((4, 12)), RNG.normal(size=(4, 12))])
    y = run(x, **form)
    assert (y[0] == 0).all() and np.isfinite(y).all() and y[1].any()
    assert (run(np.zeros((1, 1))) == 0).all() and run(np.full((1, 1), -3e-9)) == pytest.approx(-1, abs=1e-3)


@settings(max_examples=10)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4), st.data(), st.sampled_from([*COEFFICIENTS, ((1.5, -0.5, 0),)])
)
def test_any_axes_of_any_rank(shape, data, coefficients):
    """Every matrix of the stack is what it would be alone, whichever axes are its own."""
    axes = tuple(data.draw(st.permutations(range(len(shape))))[:2])
    x = np.random.default_rng(sum(shape)).normal(size=shape)
    steps = COEFFICIENTS.get(coefficients, coefficients) if isinstance(coefficients, str) else coefficients
    got = np.moveaxis(run(x, coefficients=coefficients, axes=axes), axes, (-2, -1))
    x = np.moveaxis(x, axes, (-2, -1))
    for at in np.ndindex(x.shape[:-2]):
        np.testing.assert_allclose(got[at], ref.newton_schulz(x[at], steps), atol=2e-4)


def test_batch_size_changes_nothing():
    x = RNG.normal(size=(2, 5, 8, 24))
    for size in (1, 3, 10, 64):
        np.testing.assert_allclose(run(x, batch_size=size), run(x), atol=1e-6)
    assert run(np.zeros((0, 4, 4)), batch_size=2).shape == (0, 4, 4)


def test_type_is_kept_and_computed_in_fp32():
    x = ref.matrix(RNG, 16, 64, 100).astype(jnp.bfloat16)
    y = newton_schulz(jnp.asarray(x))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, run(x).astype(jnp.bfloat16))


def test_named_coefficients():
    """Where each set leads a singular value, from the published figures."""
    s = np.geomspace(1e-2, 1, 500)
    for name, low, high in [
        ("deepseek_v4", 1, 1.00054),
        ("keller_jordan", 0.6818, 1.1344),
        ("polar_express", 1 - 1e-9, 1 + 1e-9),
    ]:
        y = s
        for a, b, c in COEFFICIENTS[name]:
            y = a * y + b * y**3 + c * y**5
        assert low <= y.min() + 1e-12 and y.max() <= high, name
    assert COEFFICIENTS["deepseek_v4"] == HYBRID == tuple(ref.HYBRID)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"coefficients": "newton"}, "there are deepseek_v4"),
        ({"coefficients": ()}, "at least one"),
        ({"coefficients": [(1, 2)]}, r"\(a, b, c\)"),
        ({"axes": (0, -2)}, "two different axes"),
        ({"precision": "float16"}, "precision must be"),
        ({"gram": True, "precision": "bfloat16"}, "diverges"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(jnp.ones((2, 3)), **options)
    with pytest.raises(TypeError, match="int32"):
        newton_schulz(jnp.ones((2, 3), jnp.int32))


def test_gradient_exists():
    """It is differentiable, for those who train through it."""
    grad = jax.grad(lambda x: newton_schulz(x)[0, 0])(jnp.asarray(RNG.normal(size=(3, 5)), jnp.float32))
    assert np.isfinite(grad).all() and np.asarray(grad).any()
