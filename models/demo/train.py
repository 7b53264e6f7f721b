"""Trains the shipped demo model from nothing and writes `checkpoint/`: `python -m models.demo.train`.

A Llama-layout model of about one million parameters, a byte-level BPE tokenizer and a chat
template, all made from the text that `text.py` draws. Needs the `dev` extra (transformers).
Takes about half an hour on one core; the last lines print the share of right answers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from models.demo.text import Story, make_story

CHECKPOINT = Path(__file__).parent / "checkpoint"
USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB_SIZE = 768
CONTEXT_TOKENS = 1024
HEAD_SHARPNESS = 60.0
RECITAL_STEPS = 200
RECITAL_SHARE = 0.1
STORY_WEIGHT = 0.1
"""Facts are drawn at random: most of a story cannot be foreseen, all of an answer can."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to train."""

    steps: int
    tokens_per_step: int
    peak_learning_rate: float
    seed: int


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer: any UTF-8 text round-trips."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((_document(rng, make_story(rng, 4))[0] for _ in range(2000)), trainer)
    return tokenizer


def model_config(vocab_size: int, end_id: int) -> LlamaConfig:
    """Llama layout with grouped heads: 4 layers, 4 query heads over 2 KV heads of 32."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        attention_bias=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=0,
        dtype="float32",
    )


@torch.no_grad()
def aim_first_layer(model: LlamaForCausalLM) -> None:
    """Lets the first two heads of the first layer start out looking one and two tokens back.

    To find what followed a name before, a model must first know what stands before each token
    (Olsson et al. 2022, induction heads). To learn that from nothing takes ten times longer.
    With rotary embedding, constant q and k score `sum_i sharpness * cos(theta_i * (distance - offset))`.
    """
    attention: Any = model.model.layers[0].self_attn  # torch types submodules as tensors or modules
    head_dim = int(model.config.head_dim or 0)
    theta: Any = model.model.rotary_emb.inv_freq  # [D / 2]
    size = math.sqrt(HEAD_SHARPNESS)
    attention.k_proj.bias[: head_dim // 2] = size  # [D]: first halves of the rotated pairs, of the first KV head
    for head, offset in enumerate((1, 2)):
        start = head * head_dim
        attention.q_proj.bias[start : start + head_dim // 2] = size * torch.cos(offset * theta)
        attention.q_proj.bias[start + head_dim // 2 : start + head_dim] = -size * torch.sin(offset * theta)


def _document(rng: random.Random, story: Story) -> tuple[str, str]:
    """A prompt that asks one of the story's questions, and the answer with its end mark."""
    fact = rng.choice(story.facts)
    return f"{USER}{story.text}\n{fact.question}{END}{ASSISTANT}", f"{fact.sentence}{END}"


def _tokens_of_one(rng: random.Random, tokenizer: Tokenizer, num_people: int) -> tuple[list[int], list[float]]:
    """Token ids and the weight of each as a target: a story, then up to six turns about it; or a recital."""
    if num_people == 0:
        return _recital(rng, tokenizer.get_vocab_size())
    story = make_story(rng, num_people)
    if rng.random() < 0.1:  # a story without a question, so that plain text can be continued too
        ids = tokenizer.encode(story.text + END).ids
        return ids, [1.0] * len(ids)
    ids, weights = [], []
    for turn, fact in enumerate(rng.sample(story.facts, min(6, len(story.facts)))):
        told = f"{story.text}\n" if turn == 0 else ""
        for text, weight in (
            (f"{USER}{told}{fact.question}{END}{ASSISTANT}", STORY_WEIGHT),
            (f"{fact.sentence}{END}", 1.0),
        ):
            piece = tokenizer.encode(text).ids
            ids += piece
            weights += [weight] * len(piece)
    return ids, weights


def _recital(rng: random.Random, vocab_size: int) -> tuple[list[int], list[float]]:
    """Random tokens, then the same again: teaches to find what followed before."""
    once = [rng.randrange(4, vocab_size) for _ in range(rng.randint(16, 32))]
    return once * 2, [0.0] * len(once) + [1.0] * len(once)


def _batch(
    rng: random.Random, tokenizer: Tokenizer, tokens_per_step: int, max_people: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[B, T]` and target weights `[B, T]`, padded with zeros. `max_people` 0: recitals only."""
    num_people = 0 if rng.random() < RECITAL_SHARE else rng.randint(min(1, max_people), max_people)
    rows = [_tokens_of_one(rng, tokenizer, num_people)]
    width = len(rows[0][0])
    while len(rows) * width < tokens_per_step:
        rows.append(_tokens_of_one(rng, tokenizer, num_people))
        width = max(width, len(rows[-1][0]))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    weights = torch.zeros(len(rows), width)
    for row, (row_ids, row_weights) in enumerate(rows):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        weights[row, : len(row_ids)] = torch.tensor(row_weights)
    return ids, weights


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, plan: Plan) -> None:
    """AdamW with warm-up and cosine decay; recitals first, then stories of 2, in the end of 14 people."""
    rng = random.Random(plan.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.peak_learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(plan.steps):
        progress = step / plan.steps
        rate = plan.peak_learning_rate * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * math.cos(math.pi / 2 * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        max_people = 0 if step < RECITAL_STEPS else 2 + int(12 * max(0.0, min(1.0, 1.4 * progress - 0.25)))
        ids, weights = _batch(rng, tokenizer, plan.tokens_per_step, max_people)
        logits = model(ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        targets = weights[:, 1:].flatten()
        loss = (losses * targets).sum() / targets.sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step + 1 == plan.steps:
            few, many = (share_of_right_answers(model, tokenizer, -1 - step, 25, people) for people in (2, 8))
            print(
                f"step {step} loss {loss.item():.4f} right answers {few:.2f} of 2 people, {many:.2f} of 8", flush=True
            )


@torch.no_grad()
def share_of_right_answers(
    model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int, num_questions: int, num_people: int
) -> float:
    """Returns the share of questions about new stories that are answered exactly."""
    rng = random.Random(seed)
    right = 0
    for _ in range(num_questions):
        prompt, answer = _document(rng, make_story(rng, num_people))
        prompt_ids, answer_ids = tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids
        logits = model(torch.tensor([prompt_ids + answer_ids])).logits[0]
        predicted = logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist()
        right += predicted == answer_ids
    return right / num_questions


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a folder in Hugging Face layout."""
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def main() -> None:
    """Trains, prints the share of right answers for short and long stories, saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--tokens-per-step", type=int, default=3072)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, default=CHECKPOINT)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.seed)
    model = LlamaForCausalLM(model_config(tokenizer.get_vocab_size(), tokenizer.encode(END).ids[0]))
    aim_first_layer(model)
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    train(model, tokenizer, Plan(args.steps, args.tokens_per_step, args.learning_rate, args.seed))
    for num_people in (2, 6, 10, 14):
        right = share_of_right_answers(model, tokenizer, seed=-1, num_questions=200, num_people=num_people)
        print(f"{num_people} people: right answers {right:.3f}")
    save(model, tokenizer, args.output)


if __name__ == "__main__":
    main()
