"""Do a message's arguments fit its actor? Asked before the actor runs, so that a mismatch is not charged as a failure.

Runs in: worker processes. Needs: nothing. Thread-safe.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dramatiq import Actor


@dataclass(frozen=True)
class _Shape:
    """What an actor takes. ``signature`` is None where Python cannot tell."""

    signature: inspect.Signature | None
    required: int
    most: int


_shapes: weakref.WeakKeyDictionary[Any, _Shape] = weakref.WeakKeyDictionary()


def misfit(actor: Actor[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Say why ``actor`` cannot be called with these arguments, or return None if it can."""
    shape = _shapes.get(actor)
    if shape is None:
        shape = _shapes[actor] = _shape_of(actor)
    # The common case without the cost of a bind: only positional arguments, and their number is right.
    if not kwargs and shape.required <= len(args) <= shape.most:
        return None
    if shape.signature is None:
        return None
    try:
        shape.signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _shape_of(actor: Actor[..., Any]) -> _Shape:
    try:
        signature = inspect.signature(actor.fn)
    except (TypeError, ValueError):
        return _Shape(None, 0, 0)
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return _Shape(signature, 1, 0)  # never by the short way
    required = sum(1 for p in positional if p.default is p.empty)
    most = len(positional)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        most = 2**31
    return _Shape(signature, required, most)
