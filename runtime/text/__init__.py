"""The text side: tokenizer, chat templates, prompts in, text out. No torch here."""
