# SPDX-License-Identifier: Apache-2.0
"""The arrays of a forward pass: which of a batch they are, and the checks of their shapes."""

import numpy as np
import pytest
from support.runs import MODEL

from dsv4_jax.mesh import ensure_mesh
from dsv4_jax.model.inputs import Inputs

IDS = np.zeros((2, 8), np.int32)


@pytest.mark.parametrize("name", ["segment_ids", "token_types", "following", "replay_starts"])
def test_one_number_for_each_token(name: str):
    """An array of another shape would be broadcast, or cut, without an error."""
    with ensure_mesh(), pytest.raises(ValueError, match=rf"{name} must be \[2, 8\] like ids, found \[2, 1\]"):
        Inputs(IDS, **{name: IDS[:, :1]}).checked(MODEL)


def test_the_inputs_of_a_batch():
    """Targets are no input; without segments every row is one document."""
    inputs = Inputs.of({"ids": IDS, "targets": IDS, "experts": IDS}, following=IDS + 1)
    assert [name for name, x in inputs._asdict().items() if x is not None] == ["ids", "following"]
    with ensure_mesh():
        assert (np.asarray(inputs.checked(MODEL).segment_ids) == 1).all()
