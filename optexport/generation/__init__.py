"""Generation with a key/value cache: a model's parts, their export and proof, and greedy decoding over the files."""
