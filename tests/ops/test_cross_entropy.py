# SPDX-License-Identifier: Apache-2.0
"""Chunked cross-entropy against whole logits, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.mesh import act_spec
from dsv4_jax.ops.cross_entropy import cross_entropy


@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
def test_chunks_give_the_whole_sum_and_its_gradients(chunk):
    """Oracle: log-softmax of all logits; chunks that divide the length, do not, and exceed it."""
    rng = np.random.RandomState(0)
    h = jax.reshard(jnp.asarray(rng.standard_normal((2, 7, 5)), jnp.float32), act_spec(3))
    head = jnp.asarray(rng.standard_normal((5, 11)), jnp.float32)
    targets = rng.randint(0, 11, (2, 7)).astype(np.int32)
    targets[0, 2:5] = targets[1, 6] = -1

    def whole(h, head):
        log_p = jax.nn.log_softmax(h @ head)
        picked = jnp.take_along_axis(log_p, jax.reshard(jnp.maximum(targets, 0), act_spec(2))[..., None], axis=-1)
        return -jnp.where(targets >= 0, picked[..., 0], 0).sum()

    def chunked(h, head):
        return cross_entropy(h, head, jax.reshard(jnp.asarray(targets), act_spec(2)), chunk)

    want, (want_h, want_head) = jax.value_and_grad(whole, (0, 1))(h, head)
    got, (got_h, got_head) = jax.jit(jax.value_and_grad(chunked, (0, 1)))(h, head)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(got_h, want_h, atol=1e-6)
    np.testing.assert_allclose(got_head, want_head, atol=1e-5)
    assert (np.asarray(got_h)[targets < 0] == 0).all()


def test_no_target_is_no_loss():
    h = jax.reshard(jnp.ones((1, 4, 3)), act_spec(3))
    targets = jax.reshard(jnp.full((1, 4), -1), act_spec(2))
    value, grad = jax.value_and_grad(cross_entropy)(h, jnp.ones((3, 5)), targets)
    assert value == 0 and (grad == 0).all()
