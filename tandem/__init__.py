"""What every Tandem process and client shares: words, messages, rules. Never reaches torch."""

__version__ = "0.1.0"
