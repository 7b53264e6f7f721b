from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.text import StopStrings

LETTERS = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=0, max_size=4).map(tuple)


def naive(text: str, stops: tuple[str, ...], *, include_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return (text[:end] if include_stop else text[: end - len(stop)]), stop
    return text, None


def run(pieces: list[str], stops: tuple[str, ...], *, include_stop: bool) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include_stop=include_stop)
    shown = ""
    for piece in pieces:
        text, matched = matcher.feed(piece)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.finish(), None


@given(LETTERS, STOPS, st.booleans(), st.data())
def test_every_split_gives_what_a_search_of_the_whole_text_gives(
    text: str, stops: tuple[str, ...], include_stop: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(pieces, stops, include_stop=include_stop) == naive(text, stops, include_stop=include_stop)


@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_the_longest_tail_that_may_become_a_stop(text: str, stops: tuple[str, ...]) -> None:
    if naive(text, stops, include_stop=False)[1] is not None:
        return
    matcher = StopStrings(stops)
    shown = "".join(matcher.feed(char)[0] for char in text)
    tails = (text[cut:] for cut in range(len(text) + 1))
    longest = next(tail for tail in tails if any(stop.startswith(tail) for stop in stops) or not tail)
    assert shown + longest == text
