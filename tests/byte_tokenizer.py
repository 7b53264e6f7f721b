"""A tokenizer whose tokens can be read as text."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def make_byte_tokenizer() -> Tokenizer:
    """Byte b is token b; 256 is the special token <eos>. GPT-2's table names the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    alphabet = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer
