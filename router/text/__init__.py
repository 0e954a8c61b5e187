"""Text and tokens: tokenising, chat templates, and streams of text from streams of tokens."""
