"""Errors that are the request's own fault -> one message and an exit code. Anything else is a bug, shown whole."""

from __future__ import annotations

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.config.errors import EXIT_BAD_REQUEST, BadRequest
from harness.config.hints import explain
from harness.store.errors import StoreError

REQUEST_ERRORS = (BadRequest, StoreError, HydraException, OmegaConfBaseException, YAMLError)
"""What a wrong request, rather than wrong code, raises."""


def explained(error: Exception) -> str:
    """The message of one of REQUEST_ERRORS, without a traceback."""
    if isinstance(error, BadRequest):
        return str(error)
    if isinstance(error, StoreError):
        return f"bad request:\n  {error}"
    return str(explain(error))


__all__ = ["EXIT_BAD_REQUEST", "REQUEST_ERRORS", "explained"]
