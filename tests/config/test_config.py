# SPDX-License-Identifier: Apache-2.0
"""Configuration: typed overrides, and an error that names the key for whatever cannot be used."""

import dataclasses
import json

import pytest

import dsv4_jax as ds
from dsv4_jax.config.files import config_from_json

TINY = "configs/tiny_v4.py"


def refused(*overrides, path=TINY):
    with pytest.raises(ds.ConfigError) as error:
        ds.load_config(path, overrides)
    message = str(error.value)
    assert "Traceback" not in message and "─" not in message
    return message


def test_overrides_are_typed_and_leave_the_rest():
    base = ds.load_config(TINY)
    cfg = ds.load_config(
        TINY,
        ["--train.steps", "250", "--optim.learning_rate=1e-3", "--model.compress-ratios", *"0 4 4 4 32 0".split()],
    )
    assert (cfg.train.steps, cfg.optim.learning_rate) == (250, 1e-3)
    assert cfg.model.compress_ratios == (0, 4, 4, 4, 32, 0)
    assert dataclasses.replace(cfg.model, compress_ratios=base.model.compress_ratios) == base.model
    assert ds.load_config(TINY, ["--model.no-yarn"]).model.yarn is False


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train.step 5", ["'train.step'", "'train.steps'"]),
        ("--model.n_head 5", ["'model.n_head'", "'model.n_heads'"]),
        ("--optim.learning-rat 5", ["'optim.learning_rat'", "'optim.learning_rate'"]),
        ("--train.steps five", ["train.steps", "five"]),
        ("--train.steps 2.5", ["train.steps", "2.5"]),
        ("--train.steps", ["train.steps", "Missing"]),
        ("--model.remat half", ["model.remat", "half", "'none'"]),
        ("steps 5", ["steps"]),
        ("--model.n-heads 3", ["model.n_heads = 3", "o_groups = 2"]),
        ("--model.compress-ratios 0 4 32 4 32", ["model.compress_ratios", "5", "6"]),
        ("--model.compress-ratios 0 4 32 4 32 0 0", ["model.compress_ratios", "7", "6"]),
        ("--model.compress-ratios 0 4 32 4 32 4", ["model.compress_ratios", "MTP"]),
        ("--model.compress-ratios 0 4 32 4 -1 0", ["model.compress_ratios", "negative"]),
        ("--model.rope-head-dim 15", ["model.rope_head_dim = 15", "even"]),
        ("--model.n-activated-experts 21", ["model.n_activated_experts = 21", "n_routed_experts = 20"]),
        ("--model.expert-waves 2 --model.expert-exchange gather", ["model.expert_waves = 2", "gather"]),
        ("--model.expert-waves 0", ["model.expert_waves = 0", "above 0"]),
        ("--train.profile-steps 5:5", ["train.profile_steps = '5:5'", "FIRST:LAST"]),
        ("--data.mixture a 0", ["data.mixture", "above 0"]),
        ("--data.border x", ["data.border = 'x'", "data.tokenizer"]),
        ("--model.dim 0", ["model.dim = 0", "above 0"]),
        ("--data.held-out 1.5", ["data.held_out = 1.5"]),
        ("--optim.b1 1", ["optim.b1 = 1"]),
        ("--optim.clip -1", ["optim.clip = -1", "0 or above"]),
        ("--optim.batch-size -1", ["optim.batch_size = -1"]),
        ("--optim.rms 0", ["optim.rms = 0", "above 0"]),
        ("--optim.gram", ["optim.gram = True", "optim.precision = 'float32', found 'auto'"]),
        ("--optim.sinkhorn-iterations 4", ["optim.sinkhorn_iterations = 4", "odd"]),
        ("--loss.mtp -1", ["loss.mtp = -1"]),
        ("--optim.warmup-steps 1000", ["optim.warmup_steps", "train.steps"]),
        ("--optim.decay-tokens 5", ["optim.decay_tokens", "two counts"]),
        ("--train.steps 0", ["train.steps", "stages"]),
        ("--train.frozen (", ["train.frozen = '('", "regular expression"]),
        ("--routing.anticipation.mode auto --spikes.loss 0 --spikes.grad-norm 0", ["spikes.loss", "auto"]),
        ("--spikes.skip -2", ["spikes.skip = -2", "-1"]),
        ("--routing.anticipation.delay -1", ["routing.anticipation.delay = -1"]),
        ("--routing.anticipation.dely 1", ["'routing.anticipation.dely'", "'routing.anticipation.delay'"]),
        ("--model.n-mtp-layers 0 --model.compress-ratios 0 4 32 4 32", ["loss.mtp", "MTP block"]),
    ],
)
def test_bad_flags_are_refused_by_name(flags, words):
    message = refused(*flags.split())
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", ["config"]),
        ("def config(): return 5", ["Config", "int"]),
        ("def config(): return 1 / 0", ["ZeroDivisionError"]),
        ("def config(:", ["SyntaxError"]),
        (
            "from dsv4_jax.config import *\ndef config(): return Config(model=TrainConfig(step=5))",
            ["'step'", "'steps'"],
        ),
        ("from dsv4_jax.config import *\ndef config(): return TrainConfig(steps='5')", ["train.steps = '5'", "int"]),
        ("from dsv4_jax.config import *\ndef config(): return ModelConfig(dim=5)", ["vocab_size"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, text, words):
    path = tmp_path / "bad.py"
    path.write_text(text)
    message = refused(path=path)
    assert all(word in message for word in [str(path), *words]), message


def test_a_missing_file_is_refused():
    assert "nowhere.py" in refused(path="nowhere.py")


def test_json_round_trip_is_the_identity_and_ignores_no_key_of_the_model():
    cfg = ds.load_config(TINY)
    tree = json.loads(json.dumps(dataclasses.asdict(cfg)))
    assert config_from_json(tree) == cfg
    tree["train"]["step"] = 1
    assert config_from_json(tree) == cfg
    tree["model"]["dims"] = 1
    with pytest.raises(ds.ConfigError, match=r"model.dims = 1 .*'dim'"):
        config_from_json(tree)


def official(**changes):
    cfg = ds.load_config(TINY).model
    fields = ("vocab_size dim n_layers n_heads head_dim rope_head_dim q_lora_rank o_groups o_lora_rank moe_inter_dim "
              "n_routed_experts n_activated_experts compress_ratios")  # fmt: skip
    return {name: getattr(cfg, name) for name in fields.split()} | changes


def test_official_fields_are_taken_or_refused_never_ignored():
    extra = {"n_shared_experts": 1, "score_func": "sqrtsoftplus", "dtype": "fp8", "expert_dtype": "fp4"}
    assert ds.model_config_from_official(official(**extra)).dim == 128
    with pytest.raises(ds.ConfigError, match=r"'rope_thetas'.*'rope_theta'"):
        ds.model_config_from_official(official(rope_thetas=1.0))
    with pytest.raises(ds.ConfigError, match="n_shared_experts = 2"):
        ds.model_config_from_official(official(n_shared_experts=2))
    with pytest.raises(ds.ConfigError, match=r"dim = '128'"):
        ds.model_config_from_official(official(dim="128"))
    fields = official()
    del fields["q_lora_rank"]
    with pytest.raises(ds.ConfigError, match="lacks q_lora_rank"):
        ds.model_config_from_official(fields)
