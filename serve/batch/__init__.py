"""``treadle generate input=FILE output=FILE``: many prompts from a file, resumable."""
