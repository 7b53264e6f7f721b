"""`make demo`: three processes on the shipped model, a few streamed answers, status, figures, a clean stop."""

from __future__ import annotations

import random
import subprocess
import sys
import time

from bench.support.cluster import serve
from models.demo.text import make_story
from tandem.client import Client, Timings


def ask(client: Client, question: str) -> tuple[str, Timings, int]:
    """Streams the answer to the terminal; returns the answer, what it took, and its number of tokens."""
    pieces: list[str] = []
    for update in client.generate(messages=[{"role": "user", "content": question}], max_tokens=40, temperature=0.0):
        print(update.text, end="", flush=True)
        pieces.append(update.text)
    print()
    if update.timings is None or update.usage is None:
        raise RuntimeError("the stream ended without usage and timings")
    return "".join(pieces), update.timings, update.usage.completion_tokens


def tell(client: Client) -> None:
    """A story goes on: plain text, sampled with a seed."""
    print("\n— a story, sampled with seed 1")
    opening = "Once upon a time there was a small town."
    print(opening, end="", flush=True)
    for update in client.generate(opening, max_tokens=60, temperature=0.7, seed=1):
        print(update.text, end="", flush=True)
    print()


def question_and_answer(client: Client, seed: int, num_people: int) -> bool:
    """Asks for one fact of a new story; whether the answer is right."""
    rng = random.Random(seed)
    story = make_story(rng, num_people)
    fact = rng.choice(story.facts)
    print(f"\n— a story about {num_people} people, and a question\n{story.text}\n  {fact.question}\n  ", end="")
    answer, timings, num_tokens = ask(client, f"{story.text}\n{fact.question}")
    right = answer == fact.sentence
    print(
        f"  [{'right' if right else 'wrong: ' + fact.sentence}] first token {timings.first_token_s * 1e3:.1f} ms"
        f" (queue {timings.queue_s * 1e3:.1f}, prefill {timings.prefill_s * 1e3:.1f});"
        f" hand-off {timings.transfer_bytes / 1024:.0f} KiB in {timings.transfer_s * 1e3:.1f} ms;"
        f" {num_tokens} tokens in {timings.total_s * 1e3:.1f} ms"
    )
    return right


def main() -> int:
    """Runs the demo; 0 if every answer was right and the processes stopped cleanly."""
    print("starting router, one prefill worker and one decode worker on the demo model …", flush=True)
    began_s = time.monotonic()
    with serve("demo", "--prefill", "1", "--decode", "1") as cluster:
        with Client(cluster.target) as client:
            client.wait_ready(timeout_s=60)
            print(f"ready at {cluster.target} after {time.monotonic() - began_s:.1f} s")
            right = [question_and_answer(client, seed, people) for seed, people in ((1, 2), (2, 6), (3, 10))]
            tell(client)
            print("\n— tandem status", flush=True)
            subprocess.run([sys.executable, "-m", "cli.main", "status", "--target", cluster.target], check=True)
        code = cluster.stop()
    print(f"\nstopped with exit code {code}; {sum(right)} of {len(right)} answers right")
    return 0 if code == 0 and all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
