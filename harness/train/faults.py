"""Deliberate faults: `fault.name=package.module:function` names a function that builds a run's session wrongly.

A fault is called on every rank with the configuration and `build`, which builds the normal session. It may change
anything, and returns the session to run: its engine, loader, checkpoints (`engine.state`) and loop (`begins`,
`progress`, `should_stop`). `fault.strength` and `fault.begins_at` are for the fault to read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from harness.config.schema import NO_FAULT, Config
from harness.train.session import Session

Build = Callable[[], Session]

AMOUNTS = {"full": 1.0, "middle": 0.1, "weak": 0.01}


def build_session(config: Config, build: Build) -> Session:
    if config.fault.name == NO_FAULT:
        return build()
    name = config.fault.name
    found: Callable[[Config, Build], Session] = resolve_name(name if ":" in name else f"{__name__}:{name}")
    return found(config, build)


def from_step(session: Session, change: Callable[[Any, float], None]) -> Session:
    """Session whose engine is changed before the fault's first step; `change` takes the engine and the share."""
    due = [change]

    def begins(step: int) -> None:
        session.begins(step)
        if due and step >= session.config.fault.begins_at:
            due.pop()(session.engine, AMOUNTS[session.config.fault.strength.name])

    return replace(session, begins=begins)


def scale_by_two(config: Config, build: Build) -> Session:
    """All gradients are twice what they should be."""

    def change(engine: Any, amount: float) -> None:
        engine.model.engine.reduce.factor *= 1.0 + amount

    return from_step(build(), change)
