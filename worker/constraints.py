"""A request with a constraint waits, before it enters its worker's line, until its grammar is compiled there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from engine.guides import Guide, Guides
from tandem.errors import TandemError, UnsupportedOption
from worker.request import Request


def begin_guides(
    guides: Guides | None,
    request: Request,
    enter: Callable[[Request], None],
    fail: Callable[[Request, TandemError], None],
) -> None:
    """Calls `enter` at once if it has no constraint; else once each of its choices has its place in the grammar.

    `fail` is called instead if that cannot be, and later if a choice cannot go on. Either may be called for a request
    that has ended meanwhile.
    """
    constraint = request.spec.sampling.constraint
    if constraint is None:
        enter(request)
        return
    if guides is None:
        fail(request, UnsupportedOption(f"sampling.{constraint.language}", "not supported by this worker"))
        return

    def ready(places: Sequence[Guide]) -> None:
        request.group.guide_choices(places)
        enter(request)

    outputs = [each.output_token_ids for each in request.group.sequences]
    guides.begin(constraint, outputs, ready, partial(fail, request))
