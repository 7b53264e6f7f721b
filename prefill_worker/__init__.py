"""The process that computes prompts, samples first tokens and pushes KV blocks."""
