# SPDX-License-Identifier: Apache-2.0
"""Run directories that cannot be used, and saves that fail: refused or noticed at once, and nothing is lost."""

import pytest

from dsv4_jax.config import TrainConfig
from dsv4_jax.validate import ConfigError


@pytest.mark.parametrize("key", ["run_dir", "init_from"])
@pytest.mark.parametrize("address", ["gs://bucket/run1", "s3://bucket/run1"])
def test_object_stores_are_refused(key, address):
    with pytest.raises(ConfigError, match=rf"train\.{key} = '{address}' is an address: use a folder"):
        TrainConfig(steps=1, **{key: address})
