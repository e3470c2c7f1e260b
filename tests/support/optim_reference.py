# SPDX-License-Identifier: Apache-2.0
"""The optimizers' formulas in float64 numpy, one matrix at a time."""

import numpy as np

HYBRID = [(3.4445, -4.7750, 2.0315)] * 8 + [(2, -1.5, 0.5)] * 2


def newton_schulz(x, steps=HYBRID):
    """Section 2.4 of the V4 report, on the matrix as it stands."""
    x = np.asarray(x, np.float64)
    if not x.any():
        return x
    x = x / np.linalg.norm(x)
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def polar(x):
    """U V^T of the singular value decomposition."""
    u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return u @ vt


def matrix(rng, rows, columns, condition):
    """A matrix of singular values from 1 down to 1 / condition, spaced evenly in their logarithm."""
    k = min(rows, columns)
    u, v = (np.linalg.qr(rng.normal(size=(n, k)))[0] for n in (rows, columns))
    return (u * np.geomspace(1, 1 / condition, k)) @ v.T


def muon(gradients, weight, lr=0.01, decay=0.1, mu=0.95, rms=0.18, momentum_form=1.0):
    """Weights of one matrix after the gradients, by Algorithm 1 of the V4 report.

    `momentum_form` 1 - mu gives the momentum as the V4.1 report writes it.
    """
    m, w = 0.0, np.asarray(weight, np.float64)
    for g in gradients:
        g = np.asarray(g, np.float64)
        m = mu * m + momentum_form * g
        o = newton_schulz(mu * m + momentum_form * g) * np.sqrt(max(w.shape)) * rms
        w = w * (1 - lr * decay) - lr * o
    return w


def sinkhorn(g, iterations=11, tau=1e-3):
    """Algorithm 1 of the V4.1 report, the matrix rewritten every time."""
    u = np.asarray(g, np.float64).copy()
    rho = np.linalg.norm(u, axis=1)
    u[rho <= tau * rho.mean()] = 0
    for k in range(1, iterations + 1):
        u /= np.linalg.norm(u, axis=k % 2, keepdims=True) + 1e-20 * (np.abs(g).max() or 1)
    return u


def sinkhorn_balanced(gradients, weight, lr=0.01, mu=0.95, scale=0.18, tau=1e-3):
    """Weights of a table after the gradients."""
    m, w = 0.0, np.asarray(weight, np.float64)
    for g in gradients:
        g = np.asarray(g, np.float64)
        m = mu * m + (1 - mu) * g
        w = w - scale * lr * np.sqrt(w.shape[1]) * sinkhorn(mu * m + (1 - mu) * g, tau=tau)
    return w


def adamw(gradients, weight, lr=0.01, decay=0.1, b1=0.9, b2=0.95, eps=1e-20):
    """Weights of any tensor after the gradients, by AdamW."""
    m = v = 0.0
    w = np.asarray(weight, np.float64)
    for t, g in enumerate(gradients, 1):
        g = np.asarray(g, np.float64)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w = w - lr * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * w)
    return w
