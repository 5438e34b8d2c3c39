"""Cases: the batches that targets are compared on, and what graphs reveal about good ones."""
