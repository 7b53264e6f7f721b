"""A request's choices on one worker, sharing blocks by reference count and copied on write.

    prefix   one sequence computes the prompt, from whose last token each choice draws its first
       └─ fork ─▶ every choice runs on its own; all hold the prefix's blocks
                     └─ take_blocks ─▶ prefix      preempted: computed again from the tokens

A request is one handle on a worker, with one or more choices. Its prefix is computed, handed over and held once. A
choice that is to write into a block which others hold takes a block of its own first; the copy goes with the step.
Beams are such sequences (`engine.beam_group`): all draw, then they fork and end by holds on blocks. Whoever takes a
group's blocks releases one hold per table. A victim of preemption is credited only with blocks that nobody else
holds.

A choice that is alone is its own prefix, and forks by doing nothing. Admission, preemption and
release take the group as one. `attach` and `follow` take over KV that a cache knows already, `remember` makes known to
it what was computed. Decides nothing; its only side effects are the pool's reference counts, and what the cache knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from engine.block_pool import BlockPool
from engine.guides import Guide
from engine.penalties import penalised_ids
from engine.prefix_cache import PrefixCache
from engine.prompt_scores import PromptScores
from engine.sequence import BlockTable, Sequence, new_token_array
from engine.step import BlockCopy
from tandem.errors import FrameError, InternalError
from tandem.first_tokens import FirstTokens, NextTokens
from tandem.types import BlockId, GroupSpec, TokenId


class Group:
    """Starts at its prefix, with nothing computed and no blocks."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self._prompt_token_ids = new_token_array(spec.prompt_token_ids)
        self._prompt_ids = penalised_ids(spec.prompt_token_ids, spec.sampling)
        self.sequences = tuple(
            Sequence(
                choice.index,
                spec.sampling.of_choice(choice.index),
                self._prompt_token_ids,
                choice.output_token_ids,
                self._prompt_ids,
            )
            for choice in spec.choices
        )
        """Every choice, in order of index."""
        num_top = spec.sampling.prompt_logprobs
        self.prompt_scores = None if num_top is None else PromptScores(spec.prompt_token_ids, num_top)
        """Given if the log-probabilities of the prompt are to be sent from here."""
        self._alone = len(self.sequences) == 1
        self.prefix = self.sequences[0] if self._alone else self._new_prefix()
        """What is computed once for all."""
        self.prefix.prompt_scores = self.prompt_scores
        self.is_forked = False
        """Whether each choice runs on its own."""
        self.num_borrowed_blocks = 0
        """How many of the held blocks other sequences held when a cache found these blocks."""

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Who takes part in steps: the prefix until the fork, then every choice that has not finished."""
        if self._alone:
            return () if self.is_finished else self.sequences
        if not self.is_forked:
            return () if self.is_finished else (self.prefix,)
        return tuple(each for each in self.sequences if not each.is_finished)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return self.prefix.is_finished if self._alone else all(each.is_finished for each in self.sequences)

    @property
    def num_seats(self) -> int:
        """Rows of a batch that it takes once it has forked: choices that have not finished."""
        return sum(not each.is_finished for each in self.sequences)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens to compute before every choice can draw; before the fork, those of resumed choices included."""
        if self.is_forked or self._alone:
            return sum(each.num_remaining_tokens for each in self.running)
        resumed = sum(each.num_output_tokens for each in self.sequences if not each.is_finished)
        return self.prefix.num_remaining_tokens + resumed

    @property
    def holds_blocks(self) -> bool:
        """Whether any of its sequences holds a block."""
        return any(len(each.block_table) for each in self._holders())

    def num_unused_slots(self, block_size: int) -> int:
        """Returns the token slots of its blocks without a token; those of a shared last block count once."""
        held = [each for each in self._holders() if len(each.block_table)]
        unused = {each.block_table[-1]: len(each.block_table) * block_size - each.num_computed_tokens for each in held}
        return sum(unused.values())

    @property
    def num_returned_blocks(self) -> int:
        """Blocks that are expected to be available once it ends: those that it holds, but for borrowed ones."""
        shared = self.prefix.block_table if self._alone else {b for each in self._holders() for b in each.block_table}
        return len(shared) - self.num_borrowed_blocks

    def num_own_blocks(self, pool: BlockPool) -> int:
        """Blocks that would be free, or cached, if the group released all its blocks: shared blocks count once, blocks
        of others not at all.
        """
        holds = Counter(block for each in self._holders() for block in each.block_table)
        return sum(pool.ref_count(block) == count for block, count in holds.items())

    def num_missing_blocks(self, pool: BlockPool) -> int:
        """Blocks that it still lacks for the tokens it has, copies on write included; at most one copy too many."""
        size = pool.block_size
        if self.is_forked or self._alone:
            return sum(
                each.blocks_wanted(each.num_remaining_tokens, size) + self.needs_copy(each, pool)
                for each in self.running
            )
        shared = self.prefix.num_tokens // size
        own = sum(-(-each.num_tokens // size) - shared for each in self.sequences if not each.is_finished)
        return shared + own - len(self.prefix.block_table)

    @property
    def awaits_guides(self) -> bool:
        """Whether its choices are to follow a grammar that they have not been given yet."""
        return self.spec.sampling.constraint is not None and self.sequences[0].guide is None

    def guide_choices(self, guides: SequenceOf[Guide]) -> None:
        """Gives each choice, in order, its place in the grammar."""
        for sequence, guide in zip(self.sequences, guides, strict=True):
            sequence.follow(guide)

    def attach(self, cache: PrefixCache) -> bool:
        """Its prefix, of which nothing is computed, takes a hold on the blocks of its tokens that the cache knows.

        Returns whether there are any.
        """
        return self._reuse(self.prefix, cache)

    def attach_more(self, cache: PrefixCache) -> bool:
        """Takes over what the cache knows by now, in place of blocks in which nothing lies. The group holds blocks for
        its prefix, nothing of which was computed here; see `attach`.
        """
        prefix, size = self.prefix, cache.pool.block_size
        num_known = prefix.num_cached_tokens // size
        found = cache.acquire(self.spec.cache_salt, prefix.token_ids, from_block=num_known)
        if not found:
            return False
        table = prefix.take_blocks()
        prefix.reuse((*table[:num_known], *found), size)
        prefix.add_blocks(table[num_known + len(found) :])
        cache.pool.release(table[num_known : num_known + len(found)])
        return True

    def follow(self, cache: PrefixCache) -> None:
        """Right after the fork, resumed choices take over what the cache knows of their own tokens."""
        for each in () if self._alone else self.running:
            if each.num_remaining_tokens > 1:
                self._reuse(each, cache)

    def prefetch(self, cache: PrefixCache) -> None:
        """While it waits without blocks: what lies on disk of its tokens comes nearer, for `attach` and `follow`."""
        for each in self._holders():
            if each.num_remaining_tokens > 1:
                cache.prefetch(self.spec.cache_salt, each.token_ids)

    def remember(self, cache: PrefixCache) -> None:
        """Makes known to the cache what its sequences have computed."""
        for each in self._holders():
            self.remember_sequence(each, cache)

    def remember_sequence(self, sequence: Sequence, cache: PrefixCache) -> None:
        """Makes known to the cache what one of its sequences has computed: full blocks whose steps have ended."""
        num_tokens = sequence.num_ended_tokens
        if num_tokens >= cache.pool.block_size:
            num_blocks = num_tokens // cache.pool.block_size
            cache.insert(self.spec.cache_salt, sequence.token_ids, sequence.block_table[:num_blocks])

    def land(self, blocks: SequenceOf[BlockId], first_tokens: FirstTokens, pool: BlockPool) -> None:
        """Takes over blocks into which the rest of the prefix's KV was received, with the first token of each choice
        that is not resumed among others, or with the next ones of every choice that ran elsewhere; then forks.

        Raises InternalError if a token is missing or not asked for; nothing has been taken over then.
        """
        ran_elsewhere = isinstance(first_tokens, NextTokens)
        takers = self.sequences if ran_elsewhere else self.prefix.drawers
        if isinstance(first_tokens, NextTokens):
            next_tokens = self.unknown_tokens(first_tokens)
        elif isinstance(first_tokens, Mapping):
            next_tokens = {index: (token_id,) for index, token_id in first_tokens.items()}
        else:
            next_tokens = {}
        if next_tokens.keys() != {each.index for each in takers}:
            raise InternalError(f"not the first tokens of choices {sorted(each.index for each in takers)}")
        self.prompt_scores = self.prefix.prompt_scores = None  # told by whoever computed the prompt
        self.prefix.add_blocks(blocks)
        self.prefix.advance(self.prefix.num_remaining_tokens)
        for each in takers:
            for token_id in next_tokens[each.index]:
                each.append_token(token_id)
        self.fork(pool)

    def unknown_tokens(self, told: NextTokens) -> dict[int, tuple[TokenId, ...]]:
        """Per choice, what it does not know of the tokens that choices which ran elsewhere have.

        Raises FrameError if these are not those of all choices, contradict what is known, or bring one nothing.
        """
        if told.by_choice.keys() != {each.index for each in self.sequences}:
            raise FrameError(f"tokens of choices {sorted(told.by_choice)}, not of all that are due")
        num_before = min(each.num_output_tokens for each in self.sequences)
        unknown = {}
        for each in self.sequences:
            known, tokens = each.output_token_ids[num_before:], told.by_choice[each.index]
            if tokens[: len(known)] != known or len(tokens) == len(known):
                raise FrameError(f"tokens of choice {each.index} that do not go on from those that are known")
            unknown[each.index] = tokens[len(known) :]
        return unknown

    def fork(self, pool: BlockPool) -> None:
        """The prefix is computed: its blocks become those of every choice that has not finished."""
        if self.is_forked:
            raise InternalError("a group forks once")
        self.is_forked = True
        if self._alone:
            return
        num_tokens, blocks = self.prefix.num_computed_tokens, self.prefix.take_blocks()
        for each in self.running:
            pool.retain(blocks)
            each.add_blocks(blocks[:])
            each.advance(num_tokens)
        pool.release(blocks)

    def copy_on_write(self, sequence: Sequence, cache: PrefixCache) -> tuple[BlockCopy, ...]:
        """Before `sequence` writes its next token: its block of that position becomes its own, if others hold it too.

        Takes one block then (raises PoolExhausted), and lets go of the shared one at once: its other
        holders keep it. Source and target must not be written before the copy is made.
        """
        if not self.needs_copy(sequence, cache.pool):
            return ()
        at = sequence.num_computed_tokens // cache.pool.block_size
        source = sequence.block_table[at]
        (target,) = cache.allocate(1)
        sequence.block_table[at] = target
        cache.pool.release((source,))
        return (BlockCopy(source, target),)

    def needs_copy(self, sequence: Sequence, pool: BlockPool) -> bool:
        """Whether `copy_on_write` would take a block."""
        at = sequence.num_computed_tokens // pool.block_size
        return at < len(sequence.block_table) and pool.is_shared(sequence.block_table[at])

    def take_blocks(self) -> list[BlockTable]:
        """Hands back every hold on a block, one table per holder, to be released; it starts again at its prefix."""
        tables = [each.take_blocks() for each in self._holders() if len(each.block_table)]
        self.is_forked = False
        self.num_borrowed_blocks = 0
        if not self._alone:
            self.prefix = self._new_prefix()
        return tables

    def _reuse(self, sequence: Sequence, cache: PrefixCache) -> bool:
        size = cache.pool.block_size
        num_full = sequence.num_computed_tokens // size
        blocks = cache.acquire(self.spec.cache_salt, sequence.token_ids, num_full)
        if blocks:
            self.num_borrowed_blocks += cache.pool.num_shared(blocks)
            cache.pool.release(sequence.reuse(blocks, size))
        return bool(blocks)

    def _new_prefix(self) -> Sequence:
        prefix = Sequence(-1, self.spec.sampling, self._prompt_token_ids, (), self._prompt_ids)
        prefix.prompt_scores = self.prompt_scores
        prefix.drawers = tuple(each for each in self.sequences if not each.is_finished and not each.num_output_tokens)
        return prefix

    def _holders(self) -> tuple[Sequence, ...]:
        return self.sequences if self._alone else (self.prefix, *self.sequences)
