"""What a model is called with: the user's data, or inputs made from what is known of the model."""
