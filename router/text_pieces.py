"""Where a long text may be cut, so that its pieces give the same tokens as the whole.

Until it has a text's last token, a tokenizer holds many times the text's size in memory; of a text that is given to it
in pieces, as much for one piece. Texts are cut before a space that follows a printable ASCII character.

If no token spans such a place, what a model makes of the text on one side of it (merges, the best path) does not depend
on the other side. Whether the steps before the model look across is tried on a text. A tokenizer of which either is not
so gets its texts whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tokenizers import Tokenizer

_PIECE_CHARACTERS = 64 * 1024
_CUT = re.compile(r"[!-~](?= )")
_SPANNING = re.compile(r"[!-~][ Ġ▁]")
"""A token with a space inside, as tokenizers write a space."""
_PROBE = (
    "It's 12345 67 o'clock; DON'T  stop: 'l l' ,  , \t x\n\n  if (a != b) { \r\n return 'x' ;  }  THEY'LL 's 't 're "
    "naïve … façade — 東京 2,000.5 % !! a1 1a __ <|a|> </s> [INST] #  ## http://a.b/c?d=e f 🙂 g\n h  "
) + " ".join(map(chr, range(0x21, 0x7F)))
"""Every character before a cut, and every kind of character near one, alone and in runs."""


def can_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether `pieces` may be used with the tokenizer."""
    if any(token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):  # takes in the space after it
        return False
    if any(_SPANNING.search(token) for token in tokenizer.get_vocab()):
        return False
    whole = _ids(tokenizer, _PROBE)
    cuts = [cut.end() for cut in _CUT.finditer(_PROBE)]
    return all(_ids(tokenizer, _PROBE[:cut]) + _ids(tokenizer, _PROBE[cut:]) == whole for cut in cuts)


def pieces(text: str) -> Iterator[str]:
    """Returns the text in pieces of about 64 Ki characters; longer where there is no place to cut."""
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + _PIECE_CHARACTERS)
        end = len(text) if cut is None else cut.end()
        yield text[start:end]
        start = end


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
