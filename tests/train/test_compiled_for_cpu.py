# SPDX-License-Identifier: Apache-2.0
"""Programs as XLA compiles them for CPUs: what must not be computed twice, and in which form products are."""

import jax
import jax.numpy as jnp

from dsv4_jax.mesh import act_spec
from dsv4_jax.model.hyper import Mix, expand
from dsv4_jax.ops.cross_entropy import cross_entropy
from dsv4_jax.ops.grouped_matmul import grouped_matmul
from dsv4_jax.train.programs import POLICY


def _gradient_text(f, *args) -> str:
    """Compile the gradient of a function for all its arguments, as a run's steps are."""
    every = tuple(range(len(args)))
    return jax.jit(jax.grad(f, every), compiler_options=POLICY.repeated).lower(*args).compile().as_text()


def test_the_gradient_of_the_streams_is_kept_between_sublayers():
    """XLA would fuse it into the four sums that read it, and so compute a whole sublayer four times."""

    def two(x, y):
        mix = Mix(jnp.ones((1, 8, 4)), jnp.ones((1, 8, 4)), jnp.full((1, 8, 4, 4), 0.25))
        return (expand(y, expand(y, x, mix), mix) ** 2).sum()

    assert _gradient_text(two, jnp.ones((1, 8, 4, 16)), jnp.ones((1, 8, 16))).count(" opt-barrier(") >= 2


def test_the_heads_gradient_is_no_product_of_two_transposes():
    """Such a product takes XLA three times as long."""
    loss = lambda h, head: cross_entropy(h, head, jnp.zeros((1, 2048), jnp.int32))
    text = _gradient_text(loss, jax.reshard(jnp.ones((1, 2048, 32)), act_spec(3)), jnp.ones((32, 512)))
    assert " dot(" in text
    assert "lhs_contracting_dims={0}, rhs_contracting_dims={1}" not in text


def test_the_experts_products_copy_neither_rows_nor_matrices():
    """Padded rows and transposed matrices take as long as a product."""
    loss = lambda x, w: (grouped_matmul(x, w, jnp.array([300, 100, 600]), "blocked") ** 2).sum()
    text = _gradient_text(loss, jnp.ones((1000, 32)), jnp.ones((3, 32, 48)))
    assert " dot(" in text
    assert " pad(" not in text
    assert "f32[3,48,32]" not in text and "f32[3,32,48]{1,2,0}" not in text
