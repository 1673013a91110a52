"""EASE in closed form (Steck 2019): half of the retriever, and a baseline of the evaluation."""

from __future__ import annotations

import numpy as np
import scipy.linalg
import scipy.sparse as sp


def solve_ease(positives: sp.csr_matrix, l2: float) -> np.ndarray:
    """Return EASE's B, float32 [n_items, n_items], zero diagonal."""
    n_users, n_items = positives.shape
    if n_items <= n_users:
        gram = (positives.T @ positives).toarray().astype(np.float64)
        gram[np.diag_indices(n_items)] += l2
        precision = _invert(gram)
        precision /= -np.diag(precision).copy()
        weights = precision.astype(np.float32)
    else:  # P = (I - Xᵀ (X P)) / l2
        projected, precision_diagonal = solve_on_users_side(positives, l2)
        weights = np.asarray(positives.T @ projected) / (l2 * precision_diagonal)
    np.fill_diagonal(weights, 0.0)
    return weights


def solve_on_users_side(positives: sp.csr_matrix, l2: float) -> tuple[np.ndarray, np.ndarray]:
    """Return X P, float32 [n_users, n_items], and the diagonal of P, float32 [n_items], without building P.

    X P = (XXᵀ + l2 I)⁻¹ X
    """
    kernel = (positives @ positives.T).toarray().astype(np.float64)
    kernel[np.diag_indices(len(kernel))] += l2
    projected = (positives.T @ _invert(kernel)).T.astype(np.float32)
    explained = np.asarray(positives.multiply(projected).sum(axis=0)).ravel()
    return projected, ((1.0 - explained) / l2).astype(np.float32)


def _invert(symmetric: np.ndarray) -> np.ndarray:
    """Return the inverse of a positive definite matrix, computed in place."""
    factor, failed_row = scipy.linalg.lapack.dpotrf(symmetric.T, lower=1, overwrite_a=1)  # LAPACK's order is the transpose's
    assert failed_row == 0, "a Gram matrix plus a positive multiple of the identity is positive definite"
    inverse, _ = scipy.linalg.lapack.dpotri(factor, lower=1, overwrite_c=1)  # cannot fail: the factor has no zero
    for row in range(len(inverse)):
        inverse[row, row + 1 :] = inverse[row + 1 :, row]
    return inverse
