"""OpenAI's API over HTTP, with vLLM's additions, over the router's entrance."""
