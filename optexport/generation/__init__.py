"""Export of generative models with a key/value cache, and greedy decoding with the files."""
