# SPDX-License-Identifier: Apache-2.0
"""Folders of published weights that tests share."""

import pytest
from support.golden_models import ruled_model
from support.published import CONFIGS

import dsv4_jax as ds


@pytest.fixture(scope="session")
def models():
    return {name: ruled_model(cfg) for name, cfg in CONFIGS.items()}


@pytest.fixture(scope="session")
def folders(models, tmp_path_factory):
    """A folder of each model in each format, in small files."""
    root, made = tmp_path_factory.mktemp("weights"), {}
    for name, model in models.items():
        for storage in ("f32", "bf16", "fp8", "fp4"):
            made[name, storage] = root / f"{name}-{storage}"
            ds.save_checkpoint(model, made[name, storage], storage, file_bytes=20_000)
    return made
