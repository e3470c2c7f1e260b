# SPDX-License-Identifier: Apache-2.0
"""Define the configuration of a run: a tree of sections. Stages change its values at token counts (docs/stages.md)."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import tyro

from dsv4_jax.config.keys import CHANGEABLE, changeable, changed
from dsv4_jax.config.sections import (
    DataConfig,
    LossConfig,
    MeshConfig,
    OptimConfig,
    RoutingConfig,
    SpikesConfig,
    TrainConfig,
)
from dsv4_jax.config.shorter import fitting_schedule
from dsv4_jax.model.config import ModelConfig
from dsv4_jax.optim.schedules import Clock, Stepwise
from dsv4_jax.section import ConfigError, Section, check_rules, deferred_rules, nearest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Section):
    """A range of a run's steps with its own values of some keys."""

    name: str
    """Name of the stage, for tables, events and flags (--stages.NAME.section.key)."""
    until: int
    """Token count at which the stage ends, counted as rows x data.seq_len of all steps since the start of the run. The
    first step that begins at this count or later belongs to the next stage."""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of the configuration, `section.key`, with their values from this stage on."""
    chosen: tuple[str, ...] = ()
    """Names of those keys, or `until`, whose values are our choice because the model's report does not give them."""


class ResolvedStage(NamedTuple):
    """A stage with its whole configuration and its range of steps.

    Attributes:
        number: number of the stage, from 0.
        declared: the stage as the configuration declares it.
        cfg: the configuration of the stage's steps. It has no stages; its `train.steps` counts the steps of all stages.
        first: number of steps of the run before this stage.
        last: number of steps of the run up to the end of this stage.
        clock: converts between steps and tokens of the run.
    """

    number: int
    declared: Stage
    cfg: "Config"
    first: int
    last: int
    clock: Clock

    @property
    def planned(self) -> int:
        """Count the tokens for which the stage's data are planned, rounded up to whole batches.

        The batch is that of the stage's first step. A change of the batch size after that step keeps this count, so
        that a position in the data keeps referring to the same row.
        """
        seen = self.clock.tokens(self.first)
        size = self.clock.tokens(self.first + 1) - seen
        return -(-(self.declared.until - seen) // size) * size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """A whole run. --stages.N.section.key VALUE sets a key from stage N on, counted from 1 as `plan` does, or named."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    routing: RoutingConfig = RoutingConfig()
    spikes: SpikesConfig = SpikesConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    stages: tyro.conf.Suppress[tuple[Stage, ...]] = ()

    def replace(self, changes: Mapping[str, Any]) -> "Config":
        """Return a copy with values replaced by key: `cfg.replace({"data.seq_len": 256, "stages": ()})`.

        If a warm-up and a decay in steps no longer fit into a lower `train.steps`, both are shortened in proportion,
        as by a flag.

        Raises:
            ConfigError: for an unknown key (naming the nearest one), a wrong type or a broken rule.
        """
        return changed(self, {**changes, **fitting_schedule(self, changes)})

    @functools.cached_property
    def resolved_stages(self) -> tuple[ResolvedStage, ...]:
        """Return the stages with their configurations and steps; a run without stages is one stage."""
        return resolve_stages(self)

    def after(self, done: tuple[tuple[int, int], ...]) -> "Config":
        """Return a copy whose stages count the steps that are `done` with the batch sizes that these had.

        Without `done`, every step counts as one batch of the present configuration. Configurations that `replace` makes
        from the copy have no `done`.

        Args:
            done: (steps, tokens) pairs, as `Clock.until` lists them.
        """
        continued = copy.copy(self)
        continued.__dict__["resolved_stages"] = resolve_stages(self, done)  # the value that the property has cached
        return continued

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of the run."""
        return self.train.steps or self.resolved_stages[-1].last

    def stage_at(self, step: int) -> ResolvedStage:
        """Return the stage of the step that follows `step` steps; after the last step, the last stage."""
        return next((stage for stage in self.resolved_stages if step < stage.last), self.resolved_stages[-1])

    def _check(self) -> None:
        """Check the rules across sections. Those of each stage are checked when the stages are resolved."""
        if not self.stages:
            self._check_stage()
            return
        devices = {
            (stage.cfg.mesh.data * stage.cfg.mesh.expert * stage.cfg.mesh.context) for stage in self.resolved_stages
        }
        if len(devices) > 1:
            raise ConfigError(f"all stages must have a mesh of the same number of devices, found {sorted(devices)}")

    def check_steps(self) -> None:
        """Check that `train.steps` is not beyond the end of the last stage.

        For a run that continues, call it on the configuration that `after` returns, because the steps that are done may
        have had another batch size.

        Raises:
            ConfigError: if it is; the message names the number of steps of the stages.
        """
        if self.stages and self.train.steps > self.resolved_stages[-1].last:
            raise ConfigError(
                f"train.steps = {self.train.steps} exceeds the {self.resolved_stages[-1].last} steps of the stages; "
                "raise the last stage's `until`"
            )

    def _check_stage(self) -> None:
        """Check the rules across sections for a run without stages, or for one stage of a run."""
        model, optim, steps, mesh = self.model, self.optim, self.train.steps, self.mesh
        if not steps:
            raise ConfigError("train.steps must be above 0 in a run without stages")
        # The mesh and the parts of an accumulated step divide the rows.
        parts = mesh.data * mesh.expert * self.train.accumulate
        if self.data.batch_size % parts:
            raise ConfigError(
                f"data.batch_size = {self.data.batch_size} must be a multiple of mesh.data x mesh.expert x "
                f"train.accumulate = {parts}"
            )
        # The objective and the losses need their blocks.
        dspark = bool(model.dspark_target_layer_ids)
        if self.loss.mtp and (dspark or not model.n_mtp_layers):
            raise ConfigError(
                f"loss.mtp = {self.loss.mtp} needs an MTP block; set it to 0, or model.n_mtp_layers to 1 and "
                "model.dspark_target_layer_ids to none"
            )
        if self.train.objective == "draft" and self.loss.extra:
            raise ConfigError(
                f"loss.extra = {self.loss.extra!r} is for pre-training, not for train.objective = 'draft'"
            )
        if self.train.objective == "draft" and not dspark:
            raise ConfigError("train.objective = 'draft' needs draft blocks: model.dspark_target_layer_ids names none")
        # Anticipatory routing in mode `auto` reacts to spikes, by a rollback that needs an old enough checkpoint.
        mode, watched = self.routing.anticipation.mode, self.spikes.loss or self.spikes.grad_norm
        if mode == "auto" and not watched:
            raise ConfigError("routing.anticipation.mode = 'auto' needs spikes.loss or spikes.grad_norm above 0")
        train, steps_back = self.train, self.spikes.margin + self.spikes.steps - 1
        reach = (train.keep - 1) * train.checkpoint_every
        if mode == "auto" and not train.keep_every and steps_back > reach:
            raise ConfigError(
                f"spikes.margin = {self.spikes.margin} with spikes.steps = {self.spikes.steps} may go back "
                f"{steps_back} steps, but train.keep = {train.keep} checkpoints, "
                f"train.checkpoint_every = {train.checkpoint_every} "
                f"steps apart, reach back only {reach}: lower spikes.margin or raise train.keep"
            )
        if mode != "off" and self.train.objective == "draft":
            raise ConfigError(
                f"routing.anticipation.mode = {mode!r} is for pre-training, not for train.objective = 'draft'"
            )
        # The schedule in steps fits into the run.
        if not optim.decay_tokens and optim.warmup_steps + optim.decay_steps > steps:
            raise ConfigError(
                f"optim.warmup_steps + optim.decay_steps = {optim.warmup_steps + optim.decay_steps} "
                f"exceeds train.steps = {steps}; shorten them or train longer"
            )


def resolve_stages(cfg: "Config", done: tuple[tuple[int, int], ...] = ((0, 0),)) -> tuple[ResolvedStage, ...]:
    """Compute the configuration and the range of steps of every stage; a run without stages is one stage.

    Args:
        cfg: configuration of the run.
        done: (steps, tokens) pairs of the steps that are done, as `Clock.until` lists them. These steps keep the batch
            sizes that they had.

    Raises:
        ConfigError: if a stage changes a key that it may not change, breaks a rule or has no step, or if the stages do
            not end at ascending token counts. The message names the stage.
    """
    if not cfg.stages:
        clock = Clock(Stepwise(((0, cfg.data.batch_size * cfg.data.seq_len),)), done)
        return (ResolvedStage(0, Stage(name="", until=clock.tokens(cfg.train.steps)), cfg, 0, cfg.train.steps, clock),)
    # Apply the changes of each stage to the configuration of the stage before it.
    configs = []
    part = cfg
    for number, stage in enumerate(cfg.stages, 1):
        with _name_in_errors(number, stage):
            for key in stage.changes:
                if not CHANGEABLE.fullmatch(key):
                    raise ConfigError(f"it cannot change {key!r}{nearest(key, changeable(cfg))}")
            # Rules across sections need the number of steps, which follows from the batch sizes in `data`. Until it is
            # known, only the rules of `data` are checked.
            with deferred_rules():
                part = changed(part, {"stages": (), **stage.changes})
            check_rules(part.data)
        configs.append(part)
    # Tokens at the start of each stage, and at the end of the last.
    starts = [0, *(stage.until for stage in cfg.stages)]
    if starts != sorted(set(starts)):
        raise ConfigError(f"the stages must end at ascending token counts above 0, found {starts[1:]}")
    sizes = (part.data.batch_size * part.data.seq_len for part in configs)
    clock = Clock(Stepwise(tuple(zip(starts, sizes, strict=False))), done)
    # With the batch sizes, token counts become numbers of steps. `train.steps` of every stage is that of the whole run.
    steps = [clock.steps(start) for start in starts]
    resolved = []
    for number, (stage, part) in enumerate(zip(cfg.stages, configs, strict=True)):
        first, last = steps[number : number + 2]
        with _name_in_errors(number + 1, stage):
            if first == last:
                raise ConfigError(f"no step begins before it ends at {stage.until:,} tokens")
            with deferred_rules():
                part = changed(part, {"train.steps": steps[-1]})
            check_rules(part)
        resolved.append(ResolvedStage(number, stage, part, first, last, clock))
    return tuple(resolved)


@contextlib.contextmanager
def _name_in_errors(number: int, stage: Stage) -> Generator[None]:
    """Prefix every ConfigError of the enclosed code with the stage: its `number`, from 1 as in `plan`, and its name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"stage {number} ({stage.name}): {error}") from None
