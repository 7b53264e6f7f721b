"""The process that owns a paged KV pool and decodes with continuous batching."""
