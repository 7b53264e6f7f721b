"""Anthropic's Messages API over HTTP, over the router's entrance."""
