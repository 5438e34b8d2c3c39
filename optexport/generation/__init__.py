"""Generation with a key/value cache: the parts of a model, their export with proof, and greedy decoding over the files."""
