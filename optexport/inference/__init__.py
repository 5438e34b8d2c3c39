"""Models with all that they need to be used: what makes inputs of texts and images, and answers of outputs."""
